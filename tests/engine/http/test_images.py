from __future__ import annotations

import base64
from typing import Any

import pytest

from fake_images import TEMPLATE, FakeImages, data_url, png
from fakes import FakeCore, byte_tokenizer, small_config
from http_served import HttpServed, Reply, http_served

pytestmark = pytest.mark.server

CAT, DOG = png("red"), png("blue")


def core(images: FakeImages | None) -> FakeCore:
    return FakeCore(tokenizer=byte_tokenizer(template=TEMPLATE), images=images)


def openai_parts(*files: bytes) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": "what is this?"},
        *({"type": "image_url", "image_url": {"url": data_url(file)}} for file in files),
    ]


async def chat(its: HttpServed, content: Any) -> Reply:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "return_token_ids": True}
    return await its.post("/v1/chat/completions", body)


async def messages(its: HttpServed, content: Any) -> Reply:
    body = {"model": "fake", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    return await its.post("/v1/messages", body)


async def test_anthropics_messages_take_images() -> None:
    images = FakeImages()
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(CAT).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    async with http_served(core(images), config=small_config()) as its:
        reply = await messages(its, content)
        assert reply.status == 200, reply.body
        assert reply.json["usage"]["input_tokens"] == len("user:") + 6 + len("what?|")
        refused = await messages(its, [{"type": "image", "source": {"type": "url", "url": "http://x"}}])
        assert (refused.status, "nothing is fetched" in refused.json["error"]["message"]) == (400, True)
    assert len(images.encoded) == 1


async def test_responses_take_images() -> None:
    images = FakeImages()
    parts = [
        {"type": "input_image", "image_url": data_url(CAT), "detail": "auto"},
        {"type": "input_text", "text": "what?"},
    ]
    async with http_served(core(images), config=small_config()) as its:
        body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 2}
        reply = await its.post("/v1/responses", body)
        assert reply.status == 200, reply.body
        assert reply.json["usage"]["input_tokens"] == len("user:") + 6 + len("what?|")
        parts[0] = {"type": "input_image", "file_id": "file-1"}
        refused = await its.post("/v1/responses", body)
        assert (refused.status, "nothing is fetched" in refused.json["error"]["message"]) == (400, True)
    assert len(images.encoded) == 1


async def test_a_text_model_refuses_or_replaces_images() -> None:
    async with http_served(core(None), config=small_config()) as its:
        reply = await chat(its, openai_parts(CAT))
        assert (reply.status, "reads only text" in reply.json["error"]["message"]) == (400, True)
        reply = await messages(its, [{"type": "image", "source": {"type": "base64", "data": ""}}])
        assert reply.status == 200
