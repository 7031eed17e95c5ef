from __future__ import annotations

import json

import pytest

from answers import TOOLS, Answer, read, reader
from fakes import byte_tokenizer
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.chat.harmony import HarmonyCalls
from octavo.engine.chat.reasoning import reasoning_named
from octavo.engine.chat.tool_choice import tool_use
from octavo.engine.structured_output.compiler import ConstraintCompiler

ANALYSIS = "<|channel|>analysis<|message|>Which file?<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"zone": "ü"}'
EARLY = ' to=functions.now<|channel|>commentary json<|message|>{"zone": "ü"}<|call|>'
FINAL = "<|channel|>final<|message|>It is four."
PREAMBLE = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
TEMPLATE = "{{ tools }}<|channel|>analysis<|message|><|channel|>commentary to=functions."
ZONE = '{"zone": "ü"}'

READ: dict[str, tuple[str, tuple[str, str, str | None]]] = {
    "analysis and a call": (ANALYSIS + CALL, ("Which file?", "", ZONE)),
    "the recipient first": (ANALYSIS + EARLY, ("Which file?", "", ZONE)),
    "a call alone": (CALL + "<|call|>", ("", "", ZONE)),
    "a preamble": (ANALYSIS + PREAMBLE + CALL, ("Which file?", "Let me look.", ZONE)),
    "an answer": (ANALYSIS + FINAL + "<|return|>", ("Which file?", "It is four.", None)),
    "an answer at once": (FINAL, ("", "It is four.", None)),
    "analysis twice": (ANALYSIS + ANALYSIS + FINAL, ("Which file?" * 2, "It is four.", None)),
    "no message": ("It is four.", ("", "It is four.", None)),
}


def answer_of(pieces: list[str], *, parser: str | None = "harmony", was_cut: bool = False) -> Answer:
    return read(reader(parser, reasoning_named("gpt_oss")), pieces, was_cut=was_cut)


@pytest.mark.parametrize("name", READ)
def test_channels_are_read_however_they_are_cut(name: str) -> None:
    text, (reasoning, content, arguments) = READ[name]
    for size in (len(text), 1, 3, 7):
        found = answer_of([text[at : at + size] for at in range(0, len(text), size)])
        assert (found.reasoning, found.shown) == (reasoning, content), size
        assert [(call.name, call.arguments) for call in found.calls] == (
            [("now", arguments)] if arguments else []
        )


def test_arguments_are_streamed_and_a_cut_call_is_not_made_whole() -> None:
    found = answer_of(list(ANALYSIS + CALL[:-3]), was_cut=True)
    [call] = found.calls
    assert (call.arguments, call.is_complete, found.shown) == (ZONE[:-3], False, "")


@pytest.mark.parametrize("end", range(1, len(ANALYSIS + FINAL)))
def test_cut_answers_show_no_part_of_a_mark(end: int) -> None:
    found = answer_of([(ANALYSIS + FINAL)[:end]], was_cut=True)
    assert "<|" not in found.reasoning + found.shown
    assert "Which file?".startswith(found.reasoning)
    assert "It is four.".startswith(found.shown)


def test_malformed_arguments_are_content() -> None:
    found = answer_of([CALL.replace('"ü"', "ü")])
    assert found.malformed
    assert "zone" in found.shown
    nobody = "<|channel|>commentary to=\n<|message|>{}"
    assert read(reader("harmony", None), [nobody]).shown == nobody


def test_without_tools_a_call_is_content() -> None:
    found = answer_of([ANALYSIS + CALL], parser=None)
    assert (found.reasoning, found.shown, found.calls) == ("Which file?", ZONE, [])


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    tokenizer = byte_tokenizer(template=TEMPLATE, specials=HarmonyCalls().marks)
    return ConstraintCompiler(tokenizer, vocab_size=tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("choice", "text", "may_come"),
    [
        ("required", ANALYSIS + CALL.replace(ZONE, "{}"), True),
        ("required", CALL.replace(ZONE, "{}"), True),
        ("required", ANALYSIS + FINAL, False),
        ("required", CALL.replace("now", "then"), False),
        ("auto", ANALYSIS + FINAL, True),
        ("auto", ANALYSIS + PREAMBLE + CALL.replace(ZONE, "{}"), True),
    ],
)
def test_forced_and_strict_calls_are_written_as_messages(
    compiler: ConstraintCompiler, choice: str, text: str, may_come: bool
) -> None:
    tokenizer = byte_tokenizer(template=TEMPLATE, specials=HarmonyCalls().marks)
    strict = json.loads(json.dumps(TOOLS[1]))
    strict["function"]["strict"] = True
    use = tool_use(tokenizer, [strict], choice)
    assert use.is_complete
    assert isinstance(use.structured, StructuredOutput)
    constraint = compiler.compile(use.structured)
    ids = tokenizer.encode(text)
    came = 0
    for token in ids:
        if constraint.is_complete or not constraint.allowed()[token]:
            break
        constraint.accept(token)
        came += 1
    assert (came == len(ids)) is may_come


def test_a_budget_of_reasoning_keeps_its_gate() -> None:
    tokenizer = byte_tokenizer(template=TEMPLATE, specials=HarmonyCalls().marks)
    use = tool_use(tokenizer, TOOLS, "required", SamplingParams(max_reasoning_tokens=9))
    assert not use.is_complete
    assert use.structured is not None
    assert "<tool_call>" in use.structured.source
