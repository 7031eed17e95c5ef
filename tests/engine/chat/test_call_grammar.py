from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from answers import TOOLS, WRITTEN, Answer, read, reader, tool
from fakes import VOCAB_SIZE, byte_tokenizer
from ledger_runner import EOS
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.chat.call_grammar import CallShape, call_grammar
from octavo.engine.chat.tool_formats import tool_format
from octavo.engine.structured_output.compiler import ConstraintCompiler
from octavo.engine.structured_output.constraint import Constraint

ARGUMENTS = {"path": "a <b> c", "text": "x\ny", "mode": 7, "options": {"k": "v"}}
PARSERS = sorted(WRITTEN)


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made = ConstraintCompiler(byte_tokenizer(), vocab_size=VOCAB_SIZE)
    yield made
    made.close()


def forced(compiler: ConstraintCompiler, parser: str, tools: Any = TOOLS, **options: Any) -> Constraint:
    form = tool_format(parser)
    assert form is not None
    given: dict[str, Any] = {"is_many": True, "start": "" if form.is_bare else form.start, **options}
    grammar = call_grammar(form.shape, tools, marks=form.marks, added_id=lambda _: None, **given)
    return compiler.compile(StructuredOutput(grammar=grammar))


def written(shape: CallShape, calls: list[tuple[str, dict[str, Any]]]) -> str:
    texts = []
    for index, (name, arguments) in enumerate(calls):
        before, after = shape.call
        before = before.replace("{name}", name).replace("{index}", str(index))
        parameters = shape.parameters
        if parameters is None:
            texts.append(before + json.dumps(arguments) + after)
            continue
        parts = []
        for key, value in arguments.items():
            text = json.dumps(value)
            if isinstance(value, str) and parameters.texts != "json":
                quote = "" if parameters.texts == "raw" else parameters.texts
                text = quote + value + quote
            elif parameters.nested == "bare" and isinstance(value, dict):
                pairs = (f"{k}:{parameters.texts}{v}{parameters.texts}" for k, v in value.items())
                text = "{" + ",".join(pairs) + "}"
            parts.append(parameters.before.replace("{key}", key) + text + parameters.after)
        texts.append(before + parameters.between.join(parts) + after)
    return shape.section[0] + shape.between.join(texts) + shape.section[1]


def followed(constraint: Constraint, text: str) -> int:
    """Return how many bytes the grammar accepts; -1 if the text is complete."""
    data = text.encode()
    for position, byte in enumerate(data):
        if constraint.is_complete or not constraint.allowed()[byte]:
            return position
        constraint.accept(byte)
    return -1 if constraint.is_complete or constraint.allowed()[EOS] else len(data)


def names_and_arguments(answer: Answer) -> list[tuple[str, Any]]:
    assert answer.shown == ""
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize("parser", PARSERS)
def test_texts_of_a_call_grammar_parse_as_calls(compiler: ConstraintCompiler, parser: str) -> None:
    form = tool_format(parser)
    assert form is not None
    calls: list[tuple[str, dict[str, Any]]] = [("write_file", ARGUMENTS), ("now", {})]
    text = written(form.shape, calls)
    assert followed(forced(compiler, parser), text) == -1, text
    assert names_and_arguments(read(reader(parser), [text])) == calls


@pytest.mark.parametrize("parser", PARSERS)
def test_a_call_grammar_forbids_other_texts(compiler: ConstraintCompiler, parser: str) -> None:
    form = tool_format(parser)
    assert form is not None
    good = written(form.shape, [("write_file", ARGUMENTS)])
    assert followed(forced(compiler, parser), "Sure") == 0
    assert followed(forced(compiler, parser), good.replace("write_file", "write_fine")) > 0
    wrong = written(form.shape, [("write_file", {**ARGUMENTS, "mode": "x"})])
    if form.shape.parameters is None:
        assert followed(forced(compiler, parser), wrong) > 0
    short = written(form.shape, [("write_file", {"path": "a"})])
    assert followed(forced(compiler, parser), short) != -1


@pytest.mark.parametrize("parser", PARSERS)
def test_a_grammar_may_allow_only_one_call(compiler: ConstraintCompiler, parser: str) -> None:
    form = tool_format(parser)
    assert form is not None
    one = written(form.shape, [("now", {})])
    assert followed(forced(compiler, parser, is_many=False), one) == -1
    two = written(form.shape, [("now", {}), ("now", {})])
    assert followed(forced(compiler, parser, is_many=False), two) != -1


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.few(5)
def test_strict_calls_may_stand_in_text_or_not_at_all(compiler: ConstraintCompiler, parser: str) -> None:
    form = tool_format(parser)
    assert form is not None
    call = written(form.shape, [("write_file", ARGUMENTS)])
    texts = ["Hello < there [x].", call]
    texts += [] if form.is_bare else [f"Wait.\n{call}"]
    for text in texts:
        assert followed(forced(compiler, parser, with_text=True), text) == -1, text
    wrong = call.replace("write_file", "write_fine")
    assert followed(forced(compiler, parser, with_text=True), wrong) != -1


def test_a_schema_may_stand_in_the_place_of_calls(compiler: ConstraintCompiler) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    for text in ('{"b": 1}', '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'):
        assert followed(forced(compiler, "json_tools", or_schema=schema), text) == -1
    assert followed(forced(compiler, "json_tools", or_schema=schema), "b") == 0


def test_optional_parameters_enums_and_definitions(compiler: ConstraintCompiler) -> None:
    made = tool("f", kind={"enum": ["a", "b"], "type": "string"}, deep={"$ref": "#/$defs/d"})
    made["function"]["parameters"] |= {"required": ["deep"], "$defs": {"d": {"type": "integer"}}}
    for arguments, fits in (
        ({"deep": 1}, True),
        ({"deep": 1, "kind": "b"}, True),
        ({"kind": "b"}, False),
        ({"deep": "x"}, False),
        ({"deep": 1, "kind": "c"}, False),
    ):
        for parser in ("qwen3_coder", "glm47", "gemma4", "pythonic"):
            form = tool_format(parser)
            assert form is not None
            if parser == "gemma4" and arguments == {"deep": "x"}:
                continue
            text = written(form.shape, [("f", arguments)])
            assert (followed(forced(compiler, parser, [made]), text) == -1) is fits, text


def test_tools_that_are_not_strict_take_any_object(compiler: ConstraintCompiler) -> None:
    loose = tool("f", a={"type": "integer"})
    loose["function"]["strict"] = False
    text = '<tool_call>\n{"name": "f", "arguments": {"z": []}}\n</tool_call>'
    assert followed(forced(compiler, "json_tools", [loose]), text) == -1
    del loose["function"]["strict"]
    assert followed(forced(compiler, "json_tools", [loose]), text) != -1


def test_marks_that_are_tokens_are_written_as_tokens() -> None:
    form = tool_format("json_tools")
    assert form is not None
    grammar = call_grammar(
        form.shape, TOOLS, start=form.start, marks=form.marks, added_id={"<tool_call>": 7}.get, is_many=False
    )
    assert '<[7]> "\\n{\\"name\\": \\"now\\"' in grammar
    assert '"}\\n</tool_call>"' in grammar
