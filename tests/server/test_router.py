"""The SMG router before real workers, driven by the openai package: `make serve-http`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from router import SCRIPT, http_server, metrics_of, needs_router, openai_client
from served import eventually_async

FLAGS = ["--num-pages", "256", "--max-running", "32", "--max-step-tokens", "128", "--page-size", "16"]
CHAT = [{"role": "user", "content": "Tell me a story about Mara and a lamp. " * 6}]


@needs_router
async def test_the_openai_package_before_two_workers() -> None:
    import openai

    async with http_server("--workers", "2", "--", *FLAGS) as ready, openai_client(ready) as client:
        assert [model.id async for model in client.models.list()] == ["demo"]
        await _check_chat(client)
        await _check_stream(client)
        await _check_choices(client)
        await _check_structured(client)
        await _check_tools(client)
        await _check_refusals(client, openai)
        await _check_many(client)
        await _check_disconnect(client, ready["worker_metrics"].split(","))


async def _chat(client: Any, **changes: Any) -> Any:
    fields = {"model": "demo", "messages": CHAT, "temperature": 0, "max_tokens": 20} | changes
    return await client.chat.completions.create(**fields)


async def _check_chat(client: Any) -> None:
    first, second = await _chat(client), await _chat(client)
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.choices[0].finish_reason == "length"
    assert first.usage.completion_tokens == 20
    assert second.usage.prompt_tokens_details.cached_tokens >= 48, "the router sends it where it was"
    stopped = await _chat(client, stop=["there"])
    assert stopped.choices[0].finish_reason == "stop"
    assert "there" not in (stopped.choices[0].message.content or "")
    text = await client.completions.create(
        model="demo", prompt="Once upon a time", temperature=0, max_tokens=9
    )
    assert text.usage.completion_tokens == 9
    assert text.choices[0].text


async def _check_stream(client: Any) -> None:
    whole = (await _chat(client)).choices[0].message.content
    events = [
        event async for event in await _chat(client, stream=True, stream_options={"include_usage": True})
    ]
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == whole
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == "length"
    assert (events[-1].usage.completion_tokens, len(events) > 5) == (20, True)


async def _check_choices(client: Any) -> None:
    two = await _chat(client, n=2, temperature=0.9, seed=5)
    assert [choice.index for choice in two.choices] == [0, 1]
    scored = await _chat(client, logprobs=True, top_logprobs=2, max_tokens=3)
    content = scored.choices[0].logprobs.content
    assert len(content) == 3
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content), "greedy takes the top"


async def _check_refusals(client: Any, openai: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="strin"):
        await _chat(client, response_format=_json_schema({"type": "strin"}))
    with pytest.raises(openai.BadRequestError, match="8192"):
        await _chat(client, messages=[{"role": "user", "content": "a b c " * 9000}])
    with pytest.raises(openai.NotFoundError):
        await _chat(client, model="nobody")


def _json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def _check_structured(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = await _chat(client, response_format=_json_schema(schema), max_tokens=80, temperature=1, seed=1)
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content)
    assert (isinstance(found["name"], str), isinstance(found["age"], int)) == (True, True)
    some = await _chat(client, response_format={"type": "json_object"}, max_tokens=60)
    assert some.choices[0].message.content.startswith("{")
    for body in ({"regex": "(left|right)!"}, {"ebnf": 'root ::= ("left" | "right") "!"'}):
        chosen = await _chat(client, extra_body=body, max_tokens=20)
        assert chosen.choices[0].message.content in ("left!", "right!")


async def _check_tools(client: Any) -> None:
    """The router asks for the call by a constraint, and parses what comes."""
    parameters = {
        "type": "object",
        "properties": {"town": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["town", "days"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = await _chat(client, tools=[tool], tool_choice=choice, max_tokens=200, temperature=1, seed=2)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    found = json.loads(call.function.arguments)
    assert found.keys() == {"town", "days"}
    assert (found["town"] in ("Rome", "Oslo"), found["days"] <= 9) == (True, True)
    assert answer.choices[0].finish_reason == "tool_calls"


async def _check_many(client: Any) -> None:
    async def one(number: int) -> str:
        messages = [{"role": "user", "content": f"Tell me a story about number {number}."}]
        stream = await _chat(client, messages=messages, stream=True, max_tokens=24)
        return "".join([e.choices[0].delta.content or "" async for e in stream if e.choices])

    together = await asyncio.gather(*(one(number) for number in range(64)))
    assert all(together)


async def _check_disconnect(client: Any, metrics: list[str]) -> None:
    stream = await _chat(client, stream=True, max_tokens=3900, extra_body={"ignore_eos": True})
    await anext(aiter(stream))
    await stream.close()

    async def aborted() -> bool:
        texts = [await metrics_of(address) for address in metrics]
        return any('octavo_requests_total{finish_reason="abort"} 1.0' in text for text in texts)

    await eventually_async(aborted, "the worker stops what nobody reads")


@needs_router
async def test_a_full_worker_is_429_and_serves_what_it_took() -> None:
    import openai

    async with http_server("--", "--num-pages", "64", "--max-running", "1", "--max-waiting", "1") as ready:
        client = openai_client(ready)

        async def one(number: int) -> str:
            messages = [{"role": "user", "content": f"Tell me {number}."}]
            try:
                answer = await _chat(
                    client, messages=messages, max_tokens=400, extra_body={"ignore_eos": True}
                )
            except openai.RateLimitError as error:
                return "429" if "at most 2" in str(error) else str(error)
            return str(answer.usage.completion_tokens)

        async with client:
            answers = await asyncio.gather(*(one(number) for number in range(16)))
    assert set(answers) == {"429", "400"}


async def test_without_the_router_there_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    python = tmp_path / "python"  # a Python beside which no router lies
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
    assert b"octavo[http]" in errors
    assert errors.count(b"\n") == 1
