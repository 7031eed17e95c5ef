from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from fakes import byte_alphabet
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.chat.reasoning import Reasoning, reasoning_named
from octavo.engine.structured_output.compiler import ConstraintCompiler
from octavo.engine.structured_output.constraint import Constraint
from octavo.engine.structured_output.reasoning_gate import ReasoningGate, ReasoningMarks
from octavo.engine.tokenizer.tokenizer import Tokenizer

EOS, THINK, END, GLUED = 256, 257, 258, 259
SIZE = 260
MARKS = Reasoning("<think>", "</think>")


def made_tokenizer(*, has_marks: bool = True) -> Tokenizer:
    characters = {byte: character for character, byte in byte_alphabet().items()}
    vocab = {characters[byte]: byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    names = ["<think>", "</think>"] if has_marks else ["<a>", "<b>"]
    backend.add_tokens([*names, ">{"])
    return Tokenizer(backend, eos_ids=frozenset({EOS}), reasoning_parser="qwen3")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return made_tokenizer()


@pytest.fixture(scope="module")
def constraint(tokenizer: Tokenizer) -> Iterator[Constraint]:
    compiler = ConstraintCompiler(tokenizer, vocab_size=SIZE)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    yield compiler.compile(StructuredOutput(json_schema=schema | {"additionalProperties": False}))
    compiler.close()


def gate_of(
    tokenizer: Tokenizer, prompt: str, constraint: Constraint | None, budget: int | None = None
) -> ReasoningGate | None:
    marks = ReasoningMarks(MARKS, tokenizer, vocab_size=SIZE)
    copy = None if constraint is None else constraint.copy()
    return marks.gate(tokenizer.encode(prompt), copy, budget)


def open_gate(
    tokenizer: Tokenizer, constraint: Constraint | None, budget: int | None = None
) -> ReasoningGate:
    gate = gate_of(tokenizer, "Hi<think>\n", constraint, budget)
    assert gate is not None
    return gate


def allowed(gate: ReasoningGate) -> set[int]:
    gate.prepare()
    return set(np.flatnonzero(gate.allowed()).tolist())


def follow(gate: ReasoningGate, tokens: list[int]) -> None:
    for token in tokens:
        assert token in allowed(gate), (token, allowed(gate))
        gate.accept(token)


def test_the_constraint_begins_after_the_end_of_reasoning(
    tokenizer: Tokenizer, constraint: Constraint
) -> None:
    gate = open_gate(tokenizer, constraint)
    assert allowed(gate) == set(range(SIZE)) - {EOS}
    follow(gate, [*b"well < {", END])
    assert allowed(gate) == {ord("{")}
    follow(gate, [*b'{"a": 2}'])
    assert gate.is_complete


def test_whether_a_prompt_has_opened_or_closed_the_reasoning(
    tokenizer: Tokenizer, constraint: Constraint
) -> None:
    assert gate_of(tokenizer, "<think>\n\n</think>\n\n", constraint) is None
    asked = gate_of(tokenizer, "what is <think>?", constraint)
    assert asked is not None
    assert allowed(asked) == {ord("{"), THINK}
    assert gate_of(made_tokenizer(has_marks=False), "Hi", constraint) is None
    assert gate_of(made_tokenizer(has_marks=False), "Hi <think>", constraint) is not None


def test_a_model_may_open_the_reasoning_itself_or_answer_at_once(
    tokenizer: Tokenizer, constraint: Constraint
) -> None:
    for thought in ([], [THINK, *b"so", END]):
        gate = gate_of(tokenizer, "Hi", constraint)
        assert gate is not None
        follow(gate, [*thought, *b'{"a": 1}'])
        assert gate.is_complete


def test_text_after_the_mark_in_its_last_token_is_part_of_the_answer(constraint: Constraint) -> None:
    tokenizer = made_tokenizer(has_marks=False)
    gate = open_gate(tokenizer, constraint)
    follow(gate, [*b"well </think", GLUED])
    assert ord('"') in allowed(gate)
    assert ord("{") not in allowed(gate)
    follow(gate, [*b'"a": 1}'])
    assert gate.is_complete


def test_a_spent_budget_writes_the_end_mark(constraint: Constraint) -> None:
    for has_marks in (True, False):
        tokenizer = made_tokenizer(has_marks=has_marks)
        gate = open_gate(tokenizer, constraint, 3)
        follow(gate, [*b"abc"])
        for token in [END] if has_marks else [*b"</think>"]:
            assert allowed(gate) == {token}
            gate.accept(token)
        follow(gate, [*b'{"a": 1}'])


def test_a_budget_of_nothing_forbids_reasoning(tokenizer: Tokenizer, constraint: Constraint) -> None:
    assert allowed(open_gate(tokenizer, constraint, 0)) == {END}
    asked = gate_of(tokenizer, "Hi", constraint, 0)
    assert asked is not None
    assert allowed(asked) == {ord("{")}


def test_a_budget_without_a_constraint_leaves_the_answer_free(tokenizer: Tokenizer) -> None:
    gate = open_gate(tokenizer, None, 1)
    assert EOS in allowed(gate)
    follow(gate, [*b"a", END])
    assert allowed(gate) == set(range(SIZE))
    assert EOS not in set(np.flatnonzero(gate.allowed(may_end=False)).tolist())
    assert not gate.is_complete


def test_samples_reason_each_for_itself(tokenizer: Tokenizer, constraint: Constraint) -> None:
    first, second = open_gate(tokenizer, constraint, 5).copies(2)
    follow(first, [END, *b'{"a": 1}'])
    follow(second, [*b"hmm"])
    assert first.is_complete
    assert not second.is_complete


def test_drafts_of_reasoning_end_before_the_mark_the_end_and_the_budget(
    tokenizer: Tokenizer, constraint: Constraint
) -> None:
    gate = open_gate(tokenizer, constraint, 10)
    assert gate.completed([*b"ab", END, *b"cd"], 8) == tuple(b"ab")
    assert gate.completed([*b"ab", EOS], 8) == tuple(b"ab")
    assert gate.completed([*b"abcdefghijklmn"], 20) == tuple(b"abcdefghi")
    drafts = gate.completed([*b"abc"], 2)
    gate.prepare(drafts)
    assert gate.after(drafts).allowed().sum() == SIZE - 1
    follow(gate, [END])
    assert gate.completed([*b"x"], 4) == tuple(b"{")


def test_harmony_answers_with_or_without_analysis() -> None:
    marks = reasoning_named("harmony")
    assert marks is not None
    assert marks.is_open("<|start|>assistant<|channel|>analysis<|message|>")
    assert not marks.is_open("<|start|>assistant")
