"""Programs that people use with OpenAI servers, where they are installed (litellm, langchain-openai, llm)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from http_served import demo_http

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # theirs
]
ASK = "Tell me a story about Mara."


def ask_litellm(base: str) -> str:
    litellm: Any = pytest.importorskip("litellm", reason="litellm is not installed")
    given = {"model": "openai/demo", "api_base": base, "api_key": "x"}
    chat = given | {"messages": [{"role": "user", "content": ASK}], "max_tokens": 8, "temperature": 0}
    whole = litellm.completion(**chat).choices[0].message.content
    events = litellm.completion(**chat, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole
    assert len(litellm.embedding(**given, input=["a", "b"]).data) == 2
    return str(whole)


def ask_langchain(base: str) -> str:
    langchain: Any = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    given = {"model": "demo", "base_url": base, "api_key": "x"}
    chat = langchain.ChatOpenAI(**given, temperature=0, max_tokens=8)
    whole = chat.invoke(ASK).content
    assert "".join(event.content for event in chat.stream(ASK)) == whole
    embeddings = langchain.OpenAIEmbeddings(**given, check_embedding_ctx_length=False)
    assert len(embeddings.embed_documents(["a", "b"])) == 2
    return str(whole)


def ask_llm(base: str) -> str:
    pytest.importorskip("llm", reason="llm is not installed")
    models: Any = pytest.importorskip("llm.default_plugins.openai_models")
    model = models.Chat("demo", model_name="demo", api_base=base)
    return str(model.prompt(ASK, temperature=0, max_tokens=8, key="x").text())


@pytest.mark.parametrize("ask", [ask_litellm, ask_langchain, ask_llm])
async def test_a_program_gets_its_answers(ask: Callable[[str], str]) -> None:
    async with demo_http() as served:
        text = await asyncio.to_thread(ask, f"http://{served.address}/v1")
        own = await served.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": ASK}], "max_tokens": 8, "temperature": 0},
        )
        assert text == own.json["choices"][0]["message"]["content"]
