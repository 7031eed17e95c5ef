from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from engines import Gate
from fake_images import RULES, TEMPLATE, FakeImages, bomb, data_url, grid_of, patches_of, png
from fakes import FakeCore, byte_tokenizer, small_config
from octavo.engine.api.errors import InvalidRequest, OctavoError, Overloaded
from octavo.engine.api.outputs import Delta
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.client.client import make_request
from octavo.engine.frontend import request_limiter
from octavo.proto import cache_pb2
from octavo.proto import generation_pb2 as pb
from served import Served, all_idle, collect, eventually, served

pytestmark = pytest.mark.server

CAT, DOG = png("red"), png("blue")
PARAMS = SamplingParams(max_tokens=2)


def core(images: FakeImages | None, gate: Gate | None = None) -> FakeCore:
    return FakeCore(tokenizer=byte_tokenizer(template=TEMPLATE), images=images, before_step=gate)


def asked(*files: Any, text: str = "what is this?") -> list[dict[str, Any]]:
    pictures = [{"type": "image", "image": file} for file in files]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *pictures]}]


async def generate(its: Served, messages: list[dict[str, Any]]) -> Delta:
    return (await collect(its.client.generate(messages, PARAMS)))[0]


def url_request(url: str) -> pb.GenerateRequest:
    parts = [pb.ContentPart(text="what is this?"), pb.ContentPart(image_url=url)]
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", parts=parts)])
    return pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(max_tokens=2))


async def refusal(its: Served, request: pb.GenerateRequest) -> OctavoError:
    call = its.client.stub.Generate(request)
    try:
        async for _ in call:
            pass
    except Exception as error:
        return its.client.translate(error)  # type: ignore[arg-type]
    raise AssertionError("it was served")


async def test_the_same_image_is_cached_and_another_is_not(tmp_path: Path) -> None:
    images = FakeImages()
    (path := tmp_path / "cat.png").write_bytes(CAT)
    async with served(core(images), config=small_config()) as its:
        found = [await generate(its, asked(file)) for file in (CAT, DOG, data_url(CAT), path)]
        async for response in its.client.stub.Generate(url_request(data_url(CAT))):
            last = response.usage
        tokens = await its.client.unary(
            its.client.stub.Tokenize, pb.TokenizeRequest(chat=url_request(data_url(CAT)).chat)
        )
    assert tokens.token_ids == [*b"user:what is this?", *[ord("~")] * 6, *b"|"]
    assert [each.prompt_tokens for each in found] == [len(tokens.token_ids)] * 4
    assert [*(each.cached_tokens for each in found), last.cached_tokens] == [0, 16, 24, 24, 24]
    assert len(images.encoded) == 2


def tensor_request(pixels: npt.NDArray[Any], **others: Any) -> pb.GenerateRequest:
    fields = {"dtype": pixels.dtype.name, "shape": pixels.shape, "values": pixels.tobytes()} | others
    part = pb.ContentPart(pixel_values=pb.PixelValues(**fields))
    request = url_request("")
    request.chat.messages[0].parts[1].CopyFrom(part)
    return request


async def test_tensors_share_the_pages_of_their_images() -> None:
    images = FakeImages()
    pixels = np.array(Image.open(io.BytesIO(CAT)))
    patches, (grid,) = patches_of(pixels, RULES), grid_of(RULES, pixels).tolist()
    normalized = ((patches / 255 - RULES.mean[0]) / RULES.std[0]).astype(np.float32)
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])
    async with served(core(images), config=small_config()) as its:
        assert (await generate(its, asked(CAT))).cached_tokens == 0
        for values, its_grid in ((patches, grid), (normalized, grid), (planes, [])):
            async for response in its.client.stub.Generate(tensor_request(values, grid=its_grid)):
                last = response.usage
            assert (last.prompt_tokens, last.cached_tokens) == (25, 24)
        for changes, message in (
            ({"grid": [1, 4, 5]}, "squares of 2 x 2 patches"),
            ({"grid": [2, 4, 6]}, "a time of 1"),
            ({"grid": []}, r"must be \[images, 3, height, width\]"),
            ({"values": b"1"}, "must have 36864 values"),
            ({"shape": [2**31, 2**31]}, "must have .* values"),
            ({"shape": [1] * 100, "values": b"1"}, "at most 32 dimensions, got 100"),
            ({"dtype": "int8"}, "must be of type uint8"),
        ):
            error = await refusal(its, tensor_request(patches, **{"grid": grid, **changes}))
            assert isinstance(error, InvalidRequest)
            assert re.search(message, str(error)), error
        await eventually(lambda: all_idle(its.engine), "pages are held")
    assert len(images.encoded) == 1


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"no picture", "must be one of PNG"),
        (CAT[:60], "a picture cannot be used"),
        (bomb(10_000), "at most 36000000 pixels, got 100000000"),
        (b"", "must have 1 to"),
        (bytes(21 * 2**20), "must have 1 to 20971520 bytes, got 22020096"),
    ],
)
async def test_a_wrong_image_costs_one_error(file: bytes, message: str) -> None:
    async with served(core(FakeImages()), config=small_config()) as its:
        with pytest.raises(InvalidRequest, match=message):
            await generate(its, asked(file))
        assert (await generate(its, asked(CAT))).prompt_tokens == 25
        await eventually(lambda: all_idle(its.engine), "pages are held")


async def test_urls_marks_and_numbers_of_images_are_checked() -> None:
    async with served(core(FakeImages()), config=small_config()) as its:
        for url in ("https://example.com/cat.png", "/etc/passwd"):
            error = await refusal(its, url_request(url))
            assert isinstance(error, InvalidRequest)
            assert "nothing is fetched" in str(error)
        with pytest.raises(InvalidRequest, match="for each of its 1 images, got 2"):
            await generate(its, asked(CAT, text="~"))
        with pytest.raises(InvalidRequest, match="at most 64 images"):
            await generate(its, asked(*[CAT] * 65))
        chat = url_request(data_url(CAT)).chat
        chat.messages[0].parts.add()
        error = await refusal(its, pb.GenerateRequest(chat=chat))
        assert "has an empty part" in str(error)


async def test_a_prefix_with_an_image_is_pinned_and_saved(tmp_path: Path) -> None:
    async with served(core(FakeImages()), config=small_config(save_dir=tmp_path, max_pinned_pages=9)) as its:
        (request := url_request(data_url(CAT))).request_id = "cat"
        async for response in its.client.stub.Generate(request):
            last = response.usage
        assert last.prompt_tokens == 25
        for name, prefix in (("a", {"chat": request.chat}), ("b", {"request_id": "cat"})):
            pin = cache_pb2.PinRequest(name=name, prefix=cache_pb2.Prefix(**prefix))
            assert (await its.client.cache.call(pin)).num_tokens == 24
            save = cache_pb2.SaveRequest(path=f"{name}.safetensors", prompt=cache_pb2.Prefix(**prefix))
            assert (await its.client.cache.call(save)).num_tokens == 24
        other = cache_pb2.Prefix(chat=url_request(data_url(DOG)).chat)
        pin = cache_pb2.PinRequest(name="c", prefix=other)
        assert (await its.client.cache.call(pin)).num_tokens == 16


async def test_one_wrong_image_of_many_requests_fails_alone() -> None:
    async with served(core(FakeImages()), config=small_config()) as its:

        async def requests() -> Any:
            for name, file in (("a", CAT), ("b", b"no picture"), ("c", DOG)):
                yield make_request(asked(file), PARAMS, request_id=name)

        deltas = [delta async for delta in its.client.generate_many(requests())]
    errors = {delta.request_id: delta.error for delta in deltas if delta.finish_reason is not None}
    assert errors.keys() == set("abc")
    assert errors["a"] is errors["c"] is None
    assert "must be one of PNG" in str(errors["b"])


async def test_a_text_model_refuses_images_and_large_messages() -> None:
    async with served(core(None), config=small_config()) as its:
        with pytest.raises(InvalidRequest, match="reads only text"):
            await generate(its, asked(CAT))
        with pytest.raises(Overloaded, match="larger than max"):
            await generate(its, asked(bytes(2**21)))


async def test_image_files_of_unfinished_requests_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limiter, "MAX_FILE_BYTES", 2 * len(CAT))
    gate = Gate()
    async with served(core(FakeImages(), gate), config=small_config()) as its:
        first = asyncio.create_task(generate(its, asked(CAT, CAT)))
        await eventually(lambda: its.engine.num_streams == 1, "it is not admitted")
        with pytest.raises(Overloaded, match="image files of unfinished requests"):
            await generate(its, asked(CAT))
        gate.open()
        await first
        assert (await generate(its, asked(CAT))).prompt_tokens == 25
