from __future__ import annotations

import json
from typing import Any

import pytest

CHAT = [{"role": "user", "content": "Tell me a story about Mara and a lamp. " * 6}]


async def chat(client: Any, **changes: Any) -> Any:
    fields = {"model": "demo", "messages": CHAT, "temperature": 0, "max_tokens": 20} | changes
    return await client.chat.completions.create(**fields)


async def check_chat(client: Any) -> None:
    first, second = await chat(client), await chat(client)
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.choices[0].finish_reason == "length"
    assert first.usage.completion_tokens == 20
    assert second.usage.prompt_tokens_details.cached_tokens >= 48, "the router sends it where it was"
    stopped = await chat(client, stop=["there"])
    assert stopped.choices[0].finish_reason == "stop"
    assert "there" not in (stopped.choices[0].message.content or "")
    text = await client.completions.create(
        model="demo", prompt="Once upon a time", temperature=0, max_tokens=9
    )
    assert text.usage.completion_tokens == 9
    assert text.choices[0].text


async def check_stream(client: Any) -> None:
    """Retries, because a slow client receives merged parts."""
    whole = (await chat(client)).choices[0].message.content
    most = 0
    for _ in range(20):
        reply = await chat(client, stream=True, stream_options={"include_usage": True})
        events = [event async for event in reply]
        assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == whole
        assert [e.choices[0].finish_reason for e in events if e.choices][-1] == "length"
        assert events[-1].usage.completion_tokens == 20
        most = max(most, len(events))
        if most > 5:
            break
    assert most > 5


async def check_choices(client: Any) -> None:
    two = await chat(client, n=2, temperature=0.9, seed=5)
    assert [choice.index for choice in two.choices] == [0, 1]
    scored = await chat(client, logprobs=True, top_logprobs=2, max_tokens=3)
    content = scored.choices[0].logprobs.content
    assert len(content) == 3
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content), "greedy takes the top"


async def check_refusals(client: Any, openai: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="strin"):
        await chat(client, response_format=json_schema({"type": "strin"}))
    with pytest.raises(openai.BadRequestError, match="8192"):
        await chat(client, messages=[{"role": "user", "content": "a b c " * 9000}])
    with pytest.raises(openai.NotFoundError):
        await chat(client, model="nobody")


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def check_structured(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = await chat(client, response_format=json_schema(schema), max_tokens=80, temperature=1, seed=1)
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content)
    assert (isinstance(found["name"], str), isinstance(found["age"], int)) == (True, True)
    some = await chat(client, response_format={"type": "json_object"}, max_tokens=60)
    assert some.choices[0].message.content.startswith("{")
    for body in ({"regex": "(left|right)!"}, {"ebnf": 'root ::= ("left" | "right") "!"'}):
        chosen = await chat(client, extra_body=body, max_tokens=20)
        assert chosen.choices[0].message.content in ("left!", "right!")


async def check_tools(client: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"town": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["town", "days"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = await chat(client, tools=[tool], tool_choice=choice, max_tokens=200, temperature=1, seed=2)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    found = json.loads(call.function.arguments)
    assert found.keys() == {"town", "days"}
    assert (found["town"] in ("Rome", "Oslo"), found["days"] <= 9) == (True, True)
    assert answer.choices[0].finish_reason == "tool_calls"
