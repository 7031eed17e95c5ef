from __future__ import annotations

import pytest

from answers import read, reader
from octavo.engine.chat.reasoning import Reasoning, reasoning_named, reasoning_of

CASES = [  # parser, whether the prompt opens the reasoning, text, expected reasoning, expected content
    ("qwen3", True, "I see.\nSo\n</think>\n\nFour < five.", "I see.\nSo", "Four < five."),
    ("qwen3", False, "<think>\nI see.\n</think>\n\nFour.", "I see.", "Four."),
    ("qwen3", False, "Four </think> five", "", "Four </think> five"),
    ("qwen3", False, "\n\n<think></think>Four.", "", "Four."),
    ("qwen3", True, "</think>Four.", "", "Four."),
    ("qwen3", True, "on </thin and on", "on </thin and on", ""),
    ("qwen3", False, "\n<thinking>Four", "", "\n<thinking>Four"),
    ("gemma4", False, "<|channel>thought\nI see.\n<channel|>Four.", "I see.", "Four."),
    ("mistral", False, "[THINK]I see.[/THINK]Four.", "I see.", "Four."),
    (
        "harmony",
        False,
        "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant<|channel|>final<|message|>Four.",
        "I see.",
        "Four.",
    ),
    ("harmony", False, "<|channel|>final<|message|>Four.", "", "Four."),
]


@pytest.mark.parametrize(("parser", "is_thinking", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content_are_separated(
    parser: str, is_thinking: bool, text: str, reasoning: str, content: str
) -> None:
    marks = reasoning_named(parser)
    for pieces in ([text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]):
        answer = read(reader(None, marks, is_thinking=is_thinking), pieces)
        assert (answer.reasoning, answer.content) == (reasoning, content)


@pytest.mark.parametrize(("parser", "is_thinking", "text", "reasoning", "content"), CASES)
def test_a_cut_answer_has_no_piece_of_a_mark(
    parser: str, is_thinking: bool, text: str, reasoning: str, content: str
) -> None:
    marks = reasoning_named(parser)
    assert marks is not None
    for length in range(len(text)):
        answer = read(reader(None, marks, is_thinking=is_thinking), [text[:length]], was_cut=True)
        assert reasoning.startswith(answer.reasoning) or (reasoning == "" and text.startswith(answer.content))
        assert content.startswith(answer.content)


def test_calls_may_follow_the_reasoning() -> None:
    text = 'so\n</think>\n\nWait.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    answer = read(reader("json_tools", reasoning_named("qwen3"), is_thinking=True), list(text))
    assert (answer.reasoning, answer.content) == ("so", "Wait.")
    assert [call.arguments for call in answer.calls] == ["{}"]


def test_marks_of_calls_within_reasoning_are_reasoning() -> None:
    text = 'maybe <tool_call>{"name": "now"}</tool_call>?</think>No.'
    answer = read(reader("json_tools", reasoning_named("qwen3"), is_thinking=True), list(text))
    assert (answer.calls, answer.content) == ([], "No.")


@pytest.mark.parametrize("before", ["Now.\n", "A <tool_call> may help. <tool_call>{</tool_call>\n"])
def test_calls_that_end_an_unclosed_reasoning_are_calls(before: str) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    text = f"{before}{call}\n{call}\n"
    made = reader("json_tools", reasoning_named("qwen3"), is_thinking=True)
    answer = read(made, list(text))
    assert [call.name for call in answer.calls if call.is_complete] == ["now", "now"]
    assert (answer.reasoning, answer.shown) == (text.strip(), "")
    long = f'{{"name": "now", "arguments": {{"a": "{"b" * 9_000}"}}}}'
    for text, was_cut in ((f"{call} or not?", False), (call, True), (call.replace("{}", long), False)):
        made = reader("json_tools", reasoning_named("qwen3"), is_thinking=True)
        answer = read(made, list(text), was_cut=was_cut)
        assert (answer.reasoning, answer.calls, answer.shown) == (text, [], "")


def test_marks_are_found_in_the_template_or_the_vocabulary() -> None:
    assert reasoning_of("{{ '<think>' }}{{ '</think>' }}", {}) == Reasoning("<think>", "</think>")
    assert reasoning_of("", {"[THINK]": 1, "[/THINK]": 2}) == reasoning_named("magistral")
    assert reasoning_of("{{ '<|channel|>analysis<|message|>' }}", {}) == reasoning_named("gpt_oss")
    opens = reasoning_of("{% if add_generation_prompt %}{{ '<think>' }}{% endif %}", {})
    assert opens is not None
    assert opens.is_open("<|assistant|><think>\n")
    assert reasoning_of("{{ '<think>' }}{{ add_generation_prompt }}", {"<think>": 1}) is None
