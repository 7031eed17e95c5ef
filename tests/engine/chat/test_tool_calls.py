from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from answers import ARGUMENTS, CALLS, STREAMED, WRITTEN, Answer, read, reader, tool
from octavo.engine.chat.answer import AnswerReader
from octavo.engine.chat.tool_formats import TOOL_PARSERS, tool_format

BEFORE = {name: "" if name == "llama3_json" else "Let me look.\n\n" for name in WRITTEN}


def calls_of(answer: Answer) -> list[tuple[str, object]]:
    assert all(call.is_complete for call in answer.calls)
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def test_every_parser_has_a_case() -> None:
    assert set(TOOL_PARSERS) - {"function_gemma", "harmony"} == set(WRITTEN)


@pytest.mark.parametrize("parser", sorted(WRITTEN))
def test_calls_of_all_families_are_read(parser: str) -> None:
    answer = read(reader(parser), [BEFORE[parser] + WRITTEN[parser]])
    assert calls_of(answer) == CALLS
    assert answer.content == BEFORE[parser].strip()
    assert answer.malformed == ""
    assert len({call.call_id for call in answer.calls}) == 2


def test_flat_arguments_of_function_gemma_are_read() -> None:
    text = "<start_function_call>call:write_file{path:<escape>a,b<escape>,mode:7}<end_function_call>"
    assert calls_of(read(reader("function_gemma"), [text])) == [("write_file", {"path": "a,b", "mode": 7})]


@pytest.mark.property
@given(st.data())
def test_cuts_between_pieces_change_nothing(data: st.DataObject) -> None:
    parser = data.draw(st.sampled_from(sorted(WRITTEN)))
    text = BEFORE[parser] + WRITTEN[parser]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert calls_of(read(reader(parser), pieces)) == CALLS


@pytest.mark.parametrize("parser", sorted(WRITTEN))
def test_a_cut_call_is_never_made_whole(parser: str) -> None:
    text = BEFORE[parser] + WRITTEN[parser]
    whole = read(reader(parser), [text])
    for length in range(len(text)):
        answer = read(reader(parser), [text[:length]], was_cut=True)
        assert answer.malformed == "", text[:length]
        assert BEFORE[parser].startswith(answer.content), text[:length]
        for call, full in zip(answer.calls, whole.calls, strict=False):
            assert call.name == full.name
            assert full.arguments.startswith(call.arguments), text[:length]
            assert call.is_complete <= (call.arguments == full.arguments)
        unfinished = [call for call in answer.calls if not call.is_complete]
        assert len(unfinished) <= 1


@pytest.mark.parametrize("parser", STREAMED)
def test_arguments_come_while_they_are_generated(parser: str) -> None:
    made, answer = reader(parser), Answer()
    text = WRITTEN[parser]
    answer.add(made.add(text[: text.index("return")]))
    assert [call.name for call in answer.calls] == ["write_file"]
    if parser != "minicpm5":  # MiniCPM5 arguments in CDATA are parsed only when they end
        assert "if x < 2 & y" in answer.calls[0].arguments
    assert '"path": "a b/<c>.py"' in answer.calls[0].arguments.replace('":"', '": "')
    assert not answer.calls[0].is_complete


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("json_tools", "<tool_call>\nnot JSON at all\n</tool_call>"),
        ("json_tools", '<tool_call>{"arguments": {}}</tool_call>'),
        ("json_tools", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
        ("json_tools", '<tool_call>{"name": "now", "arguments": {"a" 1}}</tool_call>'),
        ("json_tools", '<tool_call>{"name": "now", "arguments": {}'),
        ("mistral", "[TOOL_CALLS]now[ARGS]{'a': 1}"),
        ("kimi_k2", "<|tool_calls_section_begin|>now<|tool_calls_section_end|>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>now<｜tool▁calls▁end｜>"),
        ("qwen3_coder", "<tool_call>\nnow()\n</tool_call>"),
        (
            "qwen3_coder",
            "<tool_call><function=write_file><parameter=mode>x</parameter></function> </tool_call>",
        ),
        ("glm47", "<tool_call>what is this</tool_call>"),
        ("minimax_m2", "<minimax:tool_call></minimax:tool_call>"),
        ("gemma4", "<|tool_call>call:now{a:b}<tool_call|>"),
        ("pythonic", "<|tool_call_start|>now<|tool_call_end|>"),
    ],
)
def test_malformed_calls_return_as_text(parser: str, text: str) -> None:
    for pieces in ([f"Hm. {text} Well."], list(f"Hm. {text} Well.")):
        answer = read(reader(parser), pieces)
        assert not any(call.is_complete for call in answer.calls)
        assert text in answer.malformed, answer
        assert answer.shown.startswith("Hm.")
        assert answer.shown.endswith("Well.")


TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
NUMBER_OR_NULL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize("parser", ["glm47", "longcat", "minicpm5", "minimax_m2", "qwen3_coder"])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (TEXT_OR_NULL, "Köln", "Köln"),
        (TEXT_OR_NULL, '"Köln"', "Köln"),
        (TEXT_OR_NULL, "123", "123"),
        (TEXT_OR_NULL, "null", None),
        ({"type": ["string", "null"]}, "123", "123"),
        (NUMBER_OR_NULL, "5", 5),
        (NUMBER_OR_NULL, "null", None),
        ({"oneOf": [{"type": "array"}, {"type": "object"}]}, '{"a": true}', {"a": True}),
        ({"enum": ["a", "1"]}, '"a"', "a"),
        ({"enum": ["a", "1"]}, "1", "1"),
        ({"$ref": "#/$defs/color"}, '"red"', "red"),
        ({"$ref": "#/$defs/color"}, "12", "12"),
        ({"allOf": [{"$ref": "#/$defs/count"}]}, "12", 12),
        ({"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]}, "12", 12),
        ({"$ref": "#/$defs/itself"}, "12", 12),
        ({"const": "true"}, "true", "true"),
        ({"type": ["integer", "null"]}, "5.0", 5.0),
        ({}, "[1, null]", [1, None]),
        ({}, "Infinity", "Infinity"),
    ],
)
def test_values_have_a_type_of_their_schema(
    parser: str, schema: dict[str, Any], text: str, value: Any
) -> None:
    form = tool_format(parser)
    assert form is not None
    assert form.shape.parameters is not None
    before, after = form.shape.call
    argument = form.shape.parameters.before.replace("{key}", "a") + text + form.shape.parameters.after
    call = before.replace("{name}", "f") + argument + after
    whole = form.shape.section[0] + call + form.shape.section[1]
    made = tool("f", a=schema)
    made["function"]["parameters"]["$defs"] = {
        "color": {"enum": ["red", "12"]}, "count": {"type": "integer"}, "itself": {"$ref": "#/$defs/itself"},
    }  # fmt: skip
    for pieces in ([whole], list(whole)):
        answer = read(AnswerReader(tool_format=form, tools=[made]), pieces)
        assert calls_of(answer) == [("f", {"a": value})]


def test_values_without_a_json_form_are_malformed() -> None:
    for text in ("{1, 2}", "...", "b'x'"):
        call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
        made = AnswerReader(tool_format=tool_format("qwen3_coder"), tools=[tool("f", a={"type": "array"})])
        answer = read(made, [call])
        assert answer.malformed == call


def test_text_similar_to_a_call_is_content() -> None:
    for parser, text in (
        ("json_tools", "a <tool and <tool_cal b <"),
        ("llama3_json", '{"name": "Ada", "age": 3}'),
        ("llama3_json", "{}"),
        ("mistral", "[TOOL"),
    ):
        answer = read(reader(parser), list(text))
        assert answer.shown == text
        assert answer.calls == []


def test_names_of_calls_need_not_be_known() -> None:
    answer = read(reader("json_tools"), ['<tool_call>{"name": "gone", "arguments": {}}</tool_call>'])
    assert calls_of(answer) == [("gone", {})]


def test_arguments_in_a_string_are_unpacked() -> None:
    text = json.dumps({"name": "write_file", "arguments": json.dumps(ARGUMENTS)})
    assert calls_of(read(reader("json_tools"), [f"<tool_call>{text}</tool_call>"])) == CALLS[:1]


def test_ids_fit_the_family() -> None:
    ids = {
        parser: [call.call_id for call in read(reader(parser), [WRITTEN[parser]]).calls] for parser in WRITTEN
    }
    assert ids["kimi_k2"] == ["functions.write_file:0", "functions.now:1"]
    assert ids["mistral"][1] == "abc123DEF"
    assert len(ids["mistral"][0]) == 9
    assert ids["mistral"][0].isalnum()
    assert all(each.startswith("call_") for each in ids["json_tools"])
