from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from http_served import demo_http
from scripted import PLAIN_TEMPLATE, Scripted, scripted

pytestmark = pytest.mark.server

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "It.", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
CLAUDE_TOOL: Any = {"name": "weather", "description": "It.", "input_schema": SCHEMA}
RESPONSES_TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": None}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWER = f"Where? Köln.\n</think>\n\nLet me look.\n\n{CALL}"
USER: list[Any] = [{"role": "user", "content": "Weather?"}]


@pytest.fixture
async def model() -> AsyncIterator[Scripted]:
    async with scripted() as made:
        yield made


async def complete(model: Scripted, /, **fields: Any) -> Any:
    return await model.openai.chat.completions.create(**{"model": "fake", "messages": USER, **fields})


async def message(model: Scripted, /, **fields: Any) -> Any:
    return await model.anthropic.messages.create(
        **{"model": "fake", "max_tokens": 99, "messages": USER, **fields}
    )


async def test_a_whole_chat_has_reasoning_content_and_calls(model: Scripted) -> None:
    model.says(ANSWER)
    answer = await complete(model, tools=[TOOL, OTHER])
    [choice] = answer.choices
    said = choice.message
    assert (said.reasoning_content, said.reasoning, said.content) == (*["Where? Köln."] * 2, "Let me look.")
    [call] = said.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Köln"}
    assert choice.finish_reason == "tool_calls"
    assert '"name": "weather"' in model.prompt
    assert model.params.structured is None


async def test_a_chat_stream_gives_arguments_as_they_come(model: Scripted) -> None:
    model.says(ANSWER)
    parts: dict[str, list[str]] = {"reasoning_content": [], "content": [], "arguments": []}
    names, finish = [], None
    async for chunk in await complete(model, tools=[TOOL], stream=True):
        [choice] = chunk.choices
        finish = choice.finish_reason or finish
        for name in ("reasoning_content", "content"):
            if text := getattr(choice.delta, name, None):
                parts[name].append(text)
        for call in choice.delta.tool_calls or ():
            names += [(call.id, call.function.name)] if call.id else []
            parts["arguments"].append(call.function.arguments)
    assert {name: "".join(texts) for name, texts in parts.items()} == {
        "reasoning_content": "Where? Köln.",
        "content": "Let me look.",
        "arguments": '{"city": "Köln"}',
    }
    assert len(parts["arguments"]) > 3
    assert [name for _, name in names] == ["weather"]
    assert finish == "tool_calls"


async def test_choices_of_tools_become_constraints(model: Scripted) -> None:
    model.says(ANSWER)
    for choice, names in (
        ("required", ["weather", "time"]),
        ({"type": "function", "function": {"name": "time"}}, ["time"]),
    ):
        await complete(model, tools=[TOOL, OTHER], tool_choice=choice)
        assert model.params.structured is not None
        grammar = model.params.structured.source
        assert [name for name in ("weather", "time") if f'\\"name\\": \\"{name}' in grammar] == names
    await complete(model, tools=[TOOL], tool_choice="none")
    assert "weather" not in model.prompt
    assert model.params.structured is None


async def test_without_parallel_calls_there_is_one_call(model: Scripted) -> None:
    model.says(f"</think>{CALL}\n{CALL}")
    assert len((await complete(model, tools=[TOOL])).choices[0].message.tool_calls) == 2
    for answer in (
        await complete(model, tools=[TOOL], parallel_tool_calls=False),
        await complete(model, tools=[TOOL], tool_choice="required", parallel_tool_calls=False),
    ):
        assert len(answer.choices[0].message.tool_calls) == 1


async def test_results_go_back_through_the_template(model: Scripted) -> None:
    model.says("</think>Sunny.")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    copies = {"provider_specific_fields": {"refusal": None}}  # as LiteLLM sends messages back
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], **copies},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    answer = await complete(model, messages=messages, tools=[TOOL])
    assert answer.choices[0].message.content == "Sunny."
    asked = model.prompt
    assert f"<assistant>{CALL}\n<tool>sun\n" in asked
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Köln"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sun"}]}
    turns = [*USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    await message(model, messages=turns, tools=[CLAUDE_TOOL])
    assert model.prompt == asked
    items: list[Any] = [
        *USER,
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Köln"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    ]
    tool = RESPONSES_TOOL | {"description": "It."}
    tool.pop("strict")
    await model.openai.responses.create(model="fake", input=items, tools=[tool])
    assert json.loads(model.prompt.split("\n")[0].removeprefix("<tools>")) == TOOL
    assert model.prompt.partition("</tools>")[2] == asked.partition("</tools>")[2]


async def test_turns_of_the_assistant_in_a_row_are_one(model: Scripted) -> None:
    model.says("</think>Sunny.")
    use = {"type": "tool_use", "name": "weather", "input": {"city": "Köln"}}
    turns = [
        {"role": "assistant", "content": "Let me look."},
        {"role": "assistant", "content": [{"type": "text", "text": "Now."}, {**use, "id": "c1"}]},
        {"role": "assistant", "content": [{**use, "id": "c2"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sun"}]},
    ]
    await message(model, messages=[*USER, *turns], tools=[CLAUDE_TOOL])
    assert f"<assistant>Let me look.\n\nNow.{CALL}{CALL}\n<tool>sun\n" in model.prompt.replace(
        "\n<tool_call>", "<tool_call>"
    )


async def test_thinking_can_be_switched_off_and_bounded(model: Scripted) -> None:
    model.says("Four.")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for fields in ({"extra_body": off}, {"reasoning_effort": "none"}):
        answer = await complete(model, **fields)
        assert answer.choices[0].message.content == "Four."
        assert model.prompt.endswith("</think>\n\n")
    await message(model, thinking={"type": "disabled"})
    assert model.prompt.endswith("</think>\n\n")
    assert model.params.max_reasoning_tokens == 0
    await complete(model, extra_body={"max_reasoning_tokens": 7})
    assert model.params.max_reasoning_tokens == 7
    await message(model, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    assert model.params.max_reasoning_tokens == 1024


async def test_a_whole_message_of_anthropics_api(model: Scripted) -> None:
    model.says(ANSWER)
    said = await message(model, tools=[CLAUDE_TOOL], system=[{"type": "text", "text": "Be brief."}])
    assert [block.type for block in said.content] == ["thinking", "text", "tool_use"]
    assert (said.content[0].thinking, said.content[1].text) == ("Where? Köln.", "Let me look.")
    assert (said.content[2].name, said.content[2].input) == ("weather", {"city": "Köln"})
    assert said.stop_reason == "tool_use"
    assert said.usage.cache_read_input_tokens == 4
    assert said.usage.input_tokens == len(model.prompt) - 4
    assert "<system>Be brief.\n" in model.prompt
    model.says("</think>Yes", stop_match="END")
    said = await message(model, stop_sequences=["END"])
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", "END")
    assert model.params.stop == ("END",)
    assert (await message(model)).content[0].text == "Yes"


async def test_a_request_of_claude_code_is_served(model: Scripted) -> None:
    model.says("</think>Yes")
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.317;"}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    turns = [
        *USER,
        {"role": "system", "content": "Agents: none."},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Where?"}]},
        {"role": "user", "content": [{"type": "text", "text": "Köln"}]},
        {"role": "system", "content": "Time: 12."},
    ]
    asks = {
        "messages": turns,
        "system": [billing, {"type": "text", "text": "Be brief."}],
        "tools": [CLAUDE_TOOL],
    }
    said = await message(model, **asks, extra_body={"context_management": edits})
    assert said.content[0].text == "Yes"
    reminders = "\n\n<system-reminder>\n{}\n</system-reminder>\n"
    assert model.prompt.partition("</tools>\n")[2] == (
        f"<system>Be brief.\n<user>Weather?{reminders.format('Agents: none.')}"
        f"<assistant>Where?\n<user>Köln{reminders.format('Time: 12.')}<assistant><think>\n"
    )


async def test_conversations_with_images_and_files_continue(model: Scripted) -> None:
    model.says("</think>Yes")
    data = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    image: Any = {"type": "image", "source": data}
    text: Any = {"type": "document", "title": "notes", "source": {"type": "text", "data": "Hugo bakes."}}
    use: Any = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
    turns: list[Any] = [
        {"role": "user", "content": [image, {"type": "document", "source": data}, text]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [image]}]},
    ]
    said = await message(model, messages=turns, tools=[CLAUDE_TOOL])
    assert said.content[0].text == "Yes"
    seen, unread = "[An image is here, which this model cannot read", "[A file is here"
    assert model.prompt.count(seen) == 2
    assert model.prompt.count(unread) == 1
    assert "notes\nHugo bakes." in model.prompt
    assert "iVBOR" not in model.prompt
    parts = [
        {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "auto"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "x"},
        {"type": "input_text", "text": "What is it?"},
    ]
    response = await model.openai.responses.create(model="fake", input=[{"role": "user", "content": parts}])  # type: ignore[list-item,misc]
    assert response.output_text == "Yes"
    assert seen in model.prompt
    assert unread in model.prompt


HARMONY = (
    "<|channel|>analysis<|message|>Where? Köln.<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "Let me look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
    '<|message|>{"city": "Köln"}'
)


async def test_channels_and_calls_of_gpt_oss() -> None:
    folder = Path(__file__).parents[1] / "tokenizer" / "templates"
    async with scripted((folder / "gpt_oss.jinja").read_text()) as model:
        model.says(HARMONY)
        choice = (await complete(model, tools=[TOOL, OTHER])).choices[0]
        said = choice.message
        assert (said.reasoning_content, said.content) == ("Where? Köln.", "Let me look.")
        [call] = said.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Köln"}')
        assert choice.finish_reason == "tool_calls"
        pieces: dict[str, str] = {"reasoning_content": "", "content": "", "arguments": ""}
        async for chunk in await complete(model, tools=[TOOL], stream=True):
            delta = chunk.choices[0].delta
            for name in ("reasoning_content", "content"):
                pieces[name] += getattr(delta, name, None) or ""
            for part in delta.tool_calls or ():
                pieces["arguments"] += part.function.arguments
        assert pieces == {
            "reasoning_content": "Where? Köln.", "content": "Let me look.", "arguments": '{"city": "Köln"}'
        }  # fmt: skip
        blocks = (await message(model, tools=[CLAUDE_TOOL])).content
        assert [block.type for block in blocks] == ["thinking", "text", "tool_use"]
        async with model.anthropic.messages.stream(
            model="fake", max_tokens=99, messages=USER, tools=[CLAUDE_TOOL]
        ) as stream:
            last: Any = (await stream.get_final_message()).content[-1]
        assert last.input == {"city": "Köln"}
        asked: dict[str, Any] = {"model": "fake", "input": "Weather?", "tools": [RESPONSES_TOOL]}
        response = await model.openai.responses.create(**asked)
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        hidden = await complete(model, tools=[TOOL], extra_body={"include_reasoning": False})
        assert not hasattr(hidden.choices[0].message, "reasoning_content")
        assert hidden.choices[0].message.content == "Let me look."


async def test_an_answer_that_the_client_has_begun_continues(model: Scripted) -> None:
    model.says(' "Köln"}')
    said = await message(model, messages=[*USER, {"role": "assistant", "content": '{"city":'}])
    assert model.prompt.endswith('<user>Weather?\n<assistant>{"city":')
    assert [(block.type, block.text) for block in said.content] == [("text", ' "Köln"}')]


@pytest.mark.parametrize(("keep", "kept"), [("all", "ab"), (1, "b"), (2, "ab"), (None, "b")])
async def test_earlier_thinking_is_cleared_on_request(keep: Any, kept: str) -> None:
    turns = []
    for thought in "ab":
        block = {"type": "thinking", "thinking": thought, "signature": "x"}
        turns += [*USER, {"role": "assistant", "content": [block, {"type": "text", "text": "?"}]}]
    value = {"type": "thinking_turns", "value": keep} if isinstance(keep, int) else keep
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": value}]}
    async with scripted("{% for m in messages %}{{ m.reasoning_content }}{% endfor %}") as model:
        model.says("x")
        await message(model, messages=[*turns, *USER], extra_body={"context_management": edits})
        assert model.prompt == kept


async def test_a_stream_of_anthropics_api(model: Scripted) -> None:
    model.says(ANSWER)
    kinds = []
    async with model.anthropic.messages.stream(
        model="fake", max_tokens=99, messages=USER, tools=[CLAUDE_TOOL]
    ) as stream:
        async for event in stream:
            kinds.append(event.type)
        said = await stream.get_final_message()
    assert [block.type for block in said.content] == ["thinking", "text", "tool_use"]
    last: Any = said.content[2]
    assert last.input == {"city": "Köln"}
    assert said.stop_reason == "tool_use"
    assert said.usage.output_tokens == len(model.script.pieces)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert kinds.count("input_json") > 3


async def test_tokens_of_a_message_are_counted(model: Scripted) -> None:
    counted = await model.anthropic.messages.count_tokens(model="fake", messages=USER, tools=[CLAUDE_TOOL])
    model.says("x")
    await message(model, tools=[CLAUDE_TOOL])
    assert counted.input_tokens == len(model.prompt)


async def test_choices_of_anthropics_api_become_constraints(model: Scripted) -> None:
    model.says(ANSWER)
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        await message(model, tools=[CLAUDE_TOOL], tool_choice=choice)
        assert model.params.structured is not None
    for choice in ({"type": "auto"}, {"type": "none"}):
        await message(model, tools=[CLAUDE_TOOL], tool_choice=choice)
        assert model.params.structured is None
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    await message(model, output_config=form)
    assert model.params.structured is not None
    assert model.params.structured.kind == "json_schema"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].type"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}, r"content\[0\].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "source"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
        ({"tool_choice": {"type": "sometimes"}, "tools": [CLAUDE_TOOL]}, "tool_choice.type"),
        ({"extra_body": {"temperature": 101}}, "temperature"),
        ({"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}}, "edits"),
    ],
)
async def test_messages_refuse_by_name(model: Scripted, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=name) as caught:
        await message(model, **fields)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"


async def test_other_errors_have_anthropics_form(model: Scripted) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        await message(model, model="claude")
    body: Any = caught.value.body
    assert body["error"]["type"] == "not_found_error"


async def test_a_too_long_message_gets_anthropics_error() -> None:
    async with demo_http(max_model_len=64) as served:
        long = [{"role": "user", "content": "Hugo " * 100}]
        reply = await served.post("/v1/messages", {"messages": long, "max_tokens": 1})
        assert reply.status == 400
        assert reply.json["error"]["message"].startswith("prompt is too long: ")


async def test_a_whole_response(model: Scripted) -> None:
    model.says(ANSWER)
    response = await model.openai.responses.create(
        model="fake",
        input="Weather?",
        instructions="Be brief.",
        tools=[RESPONSES_TOOL],
        store=False,
        include=["reasoning.encrypted_content"],
    )
    thought, said, call = response.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "Where? Köln."
    assert (response.output_text, said.type) == ("Let me look.", "message")
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Köln"})
    assert (response.status, response.usage.input_tokens_details.cached_tokens) == ("completed", 4)  # type: ignore[union-attr]
    assert "<system>Be brief.\n" in model.prompt
    items: list[Any] = [*USER, *(item.model_dump(exclude_none=True) for item in response.output)]
    model.says("</think>Well.")
    again = await model.openai.responses.create(model="fake", input=items, tools=[RESPONSES_TOOL])
    assert again.output_text == "Well."
    assert f"<assistant>Let me look.{CALL}\n" in model.prompt


async def test_a_stream_of_a_response(model: Scripted) -> None:
    model.says(ANSWER)
    kinds, numbers, arguments = [], [], ""
    async with model.openai.responses.stream(
        model="fake", input="Weather?", tools=[RESPONSES_TOOL | {"strict": False}]
    ) as stream:
        async for event in stream:
            kinds.append(event.type)
            numbers.append(event.sequence_number)
            if event.type == "response.function_call_arguments.delta":
                arguments += event.delta
        response = await stream.get_final_response()
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == "Let me look."
    assert arguments == '{"city": "Köln"}'
    assert numbers == sorted(set(numbers))
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    for kind in ("reasoning_text", "output_text", "function_call_arguments", "output_item", "content_part"):
        assert f"response.{kind}.done" in kinds


async def test_a_request_of_codex_is_served(model: Scripted) -> None:
    inner = {"type": "function", "name": "close", "parameters": SCHEMA}
    space: Any = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [inner]}
    model.says('</think><tool_call>\n{"name": "agents.close", "arguments": {"city": "x"}}\n</tool_call>')
    items: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "You are Codex."}]},
        {"role": "developer", "content": [{"type": "input_text", "text": "Skills: none."}]},
        *USER,
        {"type": "function_call", "call_id": "c1", "name": "close", "namespace": "agents", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "closed"},
        {"role": "developer", "content": [{"type": "input_text", "text": "Hurry."}]},
    ]
    response = await model.openai.responses.create(
        model="fake", input=items, tools=[space], extra_body={"client_metadata": {"turn_id": "1"}}
    )
    [call] = response.output
    assert call.type == "function_call"
    assert (call.name, call.namespace, call.arguments) == ("close", "agents", '{"city": "x"}')
    tools, _, turns = model.prompt.partition("</tools>\n")
    assert '"name": "agents.close"' in tools
    assert turns == (
        "<system>You are Codex.\n\nSkills: none.\n<user>Weather?\n<assistant><tool_call>\n"
        '{"name": "agents.close", "arguments": {}}\n</tool_call>\n<tool>closed\n'
        "<user><system-reminder>\nHurry.\n</system-reminder>\n<assistant><think>\n"
    )


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].type"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ],
)
async def test_responses_refuse_by_name(model: Scripted, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=name):
        await model.openai.responses.create(**{"model": "fake", "input": "x", **fields})


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, r"tools\[0\]"),
        ({"tools": [TOOL, TOOL]}, r"tools\[1\].function.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "extra_body": {"guided_regex": "a"}}, "regex"),
    ],
)
async def test_tools_are_refused_by_name(model: Scripted, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=name):
        await complete(model, **fields)


async def test_tools_of_a_template_that_does_not_show_them_are_refused() -> None:
    async with scripted("{% for m in messages %}{{ m.content }}{% endfor %}") as model:
        model.says("x")
        with pytest.raises(openai.BadRequestError, match="does not show tools"):
            await complete(model, tools=[TOOL])
        await complete(model, tools=[TOOL], tool_choice="required")
        assert model.params.structured is not None


async def test_models_that_do_not_think_have_content_alone() -> None:
    async with scripted(PLAIN_TEMPLATE) as model:
        model.says(f"<think>?\n{CALL}")
        answer = await complete(model, tools=[TOOL])
        assert answer.choices[0].message.content == "<think>?"
        assert not hasattr(answer.choices[0].message, "reasoning_content")
        said = await message(model, tools=[CLAUDE_TOOL], thinking={"type": "adaptive"})
        assert [block.type for block in said.content] == ["text", "tool_use"]
