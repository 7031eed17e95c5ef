from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny_adapters
from octavo.engine import LLM, EngineConfig, SamplingParams
from octavo.engine.memory.model_files import resolve_model
from openai_checks import (
    chat,
    check_chat,
    check_choices,
    check_refusals,
    check_stream,
    check_structured,
    check_tools,
)
from router import SCRIPT, http_server, metrics_of, needs_router, openai_client
from served import eventually_async

pytestmark = pytest.mark.server

FLAGS = ["--num-pages", "256", "--max-running", "32", "--max-step-tokens", "128", "--page-size", "16"]


@needs_router
async def test_the_openai_package_before_two_workers() -> None:
    import openai

    async with http_server("--workers", "2", "--", *FLAGS) as ready, openai_client(ready) as client:
        assert [model.id async for model in client.models.list()] == ["demo"]
        await check_chat(client)
        await check_stream(client)
        await check_choices(client)
        await check_structured(client)
        await check_tools(client)
        await check_refusals(client, openai)
        await _check_many(client)
        await _check_disconnect(client, ready["worker_metrics"].split(","))


async def _check_many(client: Any) -> None:
    async def one(number: int) -> str:
        messages = [{"role": "user", "content": f"Tell me a story about number {number}."}]
        stream = await chat(client, messages=messages, stream=True, max_tokens=24)
        return "".join([e.choices[0].delta.content or "" async for e in stream if e.choices])

    together = await asyncio.gather(*(one(number) for number in range(64)))
    assert all(together)


async def _check_disconnect(client: Any, metrics: list[str]) -> None:
    stream = await chat(client, stream=True, max_tokens=3900, extra_body={"ignore_eos": True})
    await anext(aiter(stream))
    await stream.close()

    async def aborted() -> bool:
        texts = [await metrics_of(address) for address in metrics]
        return any('octavo_requests_total{finish_reason="abort"} 1.0' in text for text in texts)

    await eventually_async(aborted, "the worker stops what nobody reads")


@pytest.mark.slow
@needs_router
async def test_a_full_worker_answers_429_and_finishes_its_requests() -> None:
    import openai

    async with http_server("--", "--num-pages", "64", "--max-running", "1", "--max-waiting", "1") as ready:
        client = openai_client(ready)

        async def one(number: int) -> str:
            messages = [{"role": "user", "content": f"Tell me {number}."}]
            try:
                answer = await chat(
                    client, messages=messages, max_tokens=400, extra_body={"ignore_eos": True}
                )
            except openai.RateLimitError as error:
                return "429" if "at most 2" in str(error) else str(error)
            return str(answer.usage.completion_tokens)

        async with client:
            answers = await asyncio.gather(*(one(number) for number in range(16)))
    assert set(answers) == {"429", "400"}


@pytest.mark.slow
@needs_router
async def test_adapters_are_models_of_the_router(tmp_path: Path) -> None:
    tiny_adapters.make_adapter(tmp_path / "tale", resolve_model("demo"), rank=4)
    flags = [*FLAGS, "--lora-modules", f"tale={tmp_path / 'tale'}", "--lora-listen", "tale=127.0.0.1:0"]
    with LLM(EngineConfig(num_pages=64, lora_modules=(f"tale={tmp_path / 'tale'}",))) as llm:
        params = SamplingParams(max_tokens=12, temperature=0)
        prompt = "Once there was a"
        wanted = [llm.generate(prompt, params, adapter=each)[0].outputs[0].text for each in (None, "tale")]
    assert wanted[0] != wanted[1]
    async with http_server("--", *flags) as ready, openai_client(ready) as client:
        assert {model.id async for model in client.models.list()} == {"demo", "tale"}
        for model, text in zip(("demo", "tale"), wanted, strict=True):
            answer = await client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0)
            assert answer.choices[0].text == text


async def test_without_the_router_there_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    code = (
        f"import runpy, sys; sys.executable = {str(python)!r}; sys.argv = ['serve_http.py']; "
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=os.environ | {"PATH": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"pip install '.[router]'" in errors
    assert errors.count(b"\n") == 1
