from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from fakes import VOCAB_SIZE, byte_tokenizer
from ledger_runner import EOS
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.executor.sampling.sampler import NO_TOKEN_LEFT, SampleState, sample
from octavo.engine.structured_output import compiler as compiler_module
from octavo.engine.structured_output.compile_pool import Compiled, CompileJob, CompilePool
from octavo.engine.structured_output.compiler import ConstraintCompiler
from octavo.engine.structured_output.constraint import Constraint, ConstraintFailed
from octavo.engine.structured_output.trial_compiler import Refused, TrialCompiler


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made = ConstraintCompiler(byte_tokenizer(), vocab_size=VOCAB_SIZE)
    yield made
    made.close()


def follows(constraint: Constraint, text: str) -> bool:
    for byte in text.encode():
        if constraint.is_complete or not constraint.allowed()[byte]:
            return False
        constraint.accept(byte)
    return constraint.is_complete or bool(constraint.allowed()[EOS])


@pytest.mark.parametrize(
    ("structured", "good", "bad"),
    [
        (StructuredOutput(regex="(ab|c)+é?[0-9]{2}"), ["ab07", "cabé10"], ["", "ab", "ab077", "07"]),
        (StructuredOutput(choice=('say "no"\n', "é", "é!")), ['say "no"\n', "é", "é!"], ["e", "say", ""]),
        (StructuredOutput(json_object=True), ['{"a": [1, null]}', "{}"], ["[]", "1", "{"]),
        (
            StructuredOutput(json_schema={"type": "array", "items": {"type": "integer"}, "maxItems": 2}),
            ["[1, 22]", "[]"],
            ["[1,2,3]", '["1"]', "[1"],
        ),
        (StructuredOutput(json_schema=True), ["3", '"x"', "{}"], ["", "x"]),
        (
            StructuredOutput(grammar='root ::= "yes" | "no" d\nd ::= [0-9]+\n'),
            ["yes", "no42"],
            ["no", "maybe"],
        ),
        (StructuredOutput(grammar='start: "(" start? ")"'), ["()", "((()))"], ["(", "())"]),
        (
            StructuredOutput(
                structural_tag={
                    "type": "structural_tag",
                    "triggers": ["<f="],
                    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
                }
            ),
            ["no call", 'see <f=a>12</f> and "x"'],
            ["<f=b>1</f>", "<f=a>x</f>", "<f=a>1"],
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutput) else "",
)
def test_exactly_the_texts_of_the_language_are_allowed(
    compiler: ConstraintCompiler, structured: StructuredOutput, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert follows(compiler.compile(structured), text), text
    for text in bad:
        assert not follows(compiler.compile(structured), text), text


def _tag(**changes: Any) -> StructuredOutput:
    structure = {"begin": "a", "schema": {}, "end": ""} | changes
    return StructuredOutput(structural_tag={"triggers": ["a"], "structures": [structure]})


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        (StructuredOutput(regex="(a|b"), "unclosed group"),
        (StructuredOutput(regex="(?=a)b"), "look-around"),
        (StructuredOutput(regex=""), "empty output"),
        (StructuredOutput(json_schema="{"), "not JSON"),
        (StructuredOutput(json_schema={"type": "strin"}), "Invalid type: strin"),
        (StructuredOutput(json_schema={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (StructuredOutput(json_schema={"$ref": "http://127.0.0.1/x"}), "retriev"),
        (StructuredOutput(json_schema={"$ref": "file:///etc/passwd"}), "retriev"),
        (StructuredOutput(json_schema=False), "matches no output"),
        (
            StructuredOutput(json_schema={"type": "integer", "minimum": 5, "maximum": 3}),
            "greater than maximum",
        ),
        (StructuredOutput(json_schema=json.dumps(json.loads("[" * 80 + "]" * 80))), "nested more than 64"),
        (StructuredOutput(grammar="start: foo"), "unknown name"),
        (StructuredOutput(grammar="what is this"), "."),
        (
            StructuredOutput(grammar='start: "a" %json {"type": "array", "uniqueItems": true}'),
            r'a JSON schema in it, .* a forced tool: Unimplemented keys: \["uniqueItems"\]; correct it',
        ),
        (StructuredOutput(structural_tag="{}"), "triggers"),
        (
            StructuredOutput(
                structural_tag={"triggers": [], "structures": [{"begin": "a", "schema": {}, "end": ""}]}
            ),
            "must begin with one of the triggers",
        ),
        (StructuredOutput(structural_tag={"structures": [{}]}), '"triggers" must be a list'),
        (StructuredOutput(structural_tag={"triggers": ["a"], "structures": [{}]}), "begin"),
        (StructuredOutput(structural_tag={"format": {}}), "structures"),
        (_tag(invented=1), "the key 'invented' of a structure is not known"),
        (_tag(begin=1), '"begin" of a structure must be a string, got 1'),
        (_tag(end=None), '"end" of a structure must be a string, got None'),
        (_tag(schema=[]), "the schema of 'a' must be an object"),
        (StructuredOutput(structural_tag={"triggers": "a", "structures": []}), "list of strings"),
        (StructuredOutput(structural_tag={"triggers": [1], "structures": []}), "list of strings"),
        (StructuredOutput(structural_tag={"triggers": ["a"], "structures": []}), "no structures"),
        (
            StructuredOutput(structural_tag={"triggers": ["a"], "structures": [1]}),
            "must be an object, got int",
        ),
    ],
)
def test_unsupported_constraints_are_refused_with_a_reason(
    compiler: ConstraintCompiler, structured: StructuredOutput, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"{structured.kind} cannot be used: .*{reason}") as refusal:
        compiler.compile(structured)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "exactly one of .* got none"),
        ({"regex": "a", "choice": ("b",)}, "got regex and choice"),
        ({"json_schema": False, "json_object": True}, "json_object and json_schema"),
        ({"choice": "yes"}, "tuple of strings"),
        ({"choice": ("a", "")}, "empty string"),
        ({"choice": ("a",) * 1025}, "got 1025"),
        ({"choice": (1,)}, "must hold strings"),
        ({"regex": "a" * 300_000}, "got 300000"),
        ({"choice": ("a" * 300_000,)}, "got 300000"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema cannot be written as JSON"),
    ],
)
def test_a_constraint_has_exactly_one_kind(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        StructuredOutput(**fields)


def test_an_unreadable_tokenizer_is_reported() -> None:
    class Strange:
        eos_ids, vocab_size = frozenset({1}), 4

        def serialized(self) -> str:
            return "{}"

    with pytest.raises(InvalidRequest, match="not possible with this model's tokenizer"):
        ConstraintCompiler(Strange(), vocab_size=4).compile(StructuredOutput(regex="a"))  # type: ignore[arg-type]


def test_compiled_grammars_are_kept_within_bounds(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_ = CompilePool._compile

    def counting(self: CompilePool, helper: TrialCompiler, job: CompileJob) -> Compiled | Refused:
        compiled.append(job.source)
        return compile_(self, helper, job)

    monkeypatch.setattr(CompilePool, "_compile", counting)
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 2)
    for pattern in ("aa", "bb", "aa", "cc", "aa", "bb"):
        assert follows(compiler.compile(StructuredOutput(regex=pattern)), pattern)
    assert compiled == ["aa", "bb", "cc", "bb"]
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="look-around"):
            compiler.compile(StructuredOutput(regex="(?=aa)"))
    assert compiled[4:] == ["(?=aa)"], "what was refused is refused again without a try"
    monkeypatch.setattr(compiler_module, "MAX_CACHED_CHARACTERS", 3)
    compiler.compile(StructuredOutput(regex="dd"))
    assert list(compiler._cache) == [("regex", "dd")]


def test_copies_of_one_constraint_go_their_own_ways_from_several_threads(
    compiler: ConstraintCompiler,
) -> None:
    def one(number: int) -> bool:
        text = "ab" * (number % 7 + 1) + "x"
        return follows(compiler.compile(StructuredOutput(regex="(ab)*x")), text)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(64)))


def test_an_end_is_held_back_unless_nothing_else_may_come(compiler: ConstraintCompiler) -> None:
    constraint = compiler.compile(StructuredOutput(regex="a?b?"))
    assert constraint.allowed()[EOS]
    assert np.flatnonzero(constraint.allowed(may_end=False)).tolist() == [ord("a"), ord("b")]
    constraint.accept(ord("b"))
    assert constraint.is_complete
    assert np.flatnonzero(constraint.allowed(may_end=False)).tolist() == [EOS]


def test_a_wrong_token_shows(compiler: ConstraintCompiler) -> None:
    constraint = compiler.compile(StructuredOutput(regex="ab"))
    constraint.accept(ord("b"))
    assert not constraint.is_complete
    with pytest.raises(ConstraintFailed, match="regex could not be checked"):
        constraint.allowed()


def test_a_model_without_an_end_token_is_reported() -> None:
    own = ConstraintCompiler(byte_tokenizer(eos_ids=frozenset()), vocab_size=VOCAB_SIZE)
    with pytest.raises(InvalidRequest, match="needs a model with an end token"):
        own.compile(StructuredOutput(regex="ab?"))


def _state(compiler: ConstraintCompiler, pattern: str, **changes: Any) -> SampleState:
    params = SamplingParams(structured=StructuredOutput(regex=pattern), **changes)
    assert params.structured is not None
    return SampleState(
        params,
        seed=1,
        prompt_ids=[0],
        vocab_size=VOCAB_SIZE,
        end_ids={EOS},
        constraint=compiler.compile(params.structured),
    )


def test_only_the_constrained_row_of_a_batch_is_masked(compiler: ConstraintCompiler) -> None:
    logits = np.zeros((2, VOCAB_SIZE), np.float32)
    logits[:, ord("z")] = 9
    free = SampleState(SamplingParams(), seed=1, prompt_ids=[0], vocab_size=VOCAB_SIZE)
    drawn = sample(logits, [_state(compiler, "[a-c]"), free])
    assert [drawn[0].token, drawn[1].token] == [ord("a"), ord("z")]
    assert (logits[0] == logits[1]).all(), "the model's logits stay as they are"


def test_logprobs_cover_only_allowed_tokens(compiler: ConstraintCompiler) -> None:
    (drawn,) = sample(np.zeros((1, VOCAB_SIZE), np.float32), [_state(compiler, "[ab]", logprobs=5)])
    assert drawn.logprob is not None
    assert [token for token, _ in drawn.logprob.top] == [ord("a"), ord("b")]
    assert drawn.logprob.logprob == pytest.approx(-np.log(2))


def test_sampling_obeys_the_constraint_and_min_tokens(compiler: ConstraintCompiler) -> None:
    state = _state(compiler, "[ab]*", temperature=1.0, min_tokens=20, max_tokens=30, logit_bias={EOS: 50})
    text = ""
    while (token := sample(np.zeros((1, VOCAB_SIZE), np.float32), [state])[0].token) != EOS:
        assert token is not None
        state.record(token)
        text += chr(token)
    assert len(text) == 20
    assert re.fullmatch("[ab]*", text)


def test_a_row_without_a_finite_allowed_logit_fails_alone(compiler: ConstraintCompiler) -> None:
    logits = np.zeros((1, VOCAB_SIZE), np.float32)
    logits[0, ord("a")] = -np.inf
    (drawn,) = sample(logits, [_state(compiler, "a")])
    assert drawn.token is None
    assert drawn.error == NO_TOKEN_LEFT


def test_drafts_are_allowed_or_forced_tokens(compiler: ConstraintCompiler) -> None:
    constraint = compiler.compile(StructuredOutput(regex='"(name|names)": [0-9]{2}!'))
    assert constraint.completed(list(b'"nano'), 8) == tuple(b'"na' + b"me")
    assert constraint.completed((), 3) == tuple(b'"na')
    assert constraint.completed(list(b'"names": 1'), 9) == tuple(b'"names": ')
    assert constraint.completed(list(b'"names": 12!'), 30) == tuple(b'"names": 12'), (
        "not what ends the output"
    )
    assert constraint.completed((), 0) == ()
    assert follows(constraint, '"names": 12!'), "asking has changed nothing"


def test_masks_after_drafts_are_those_of_the_tokens(compiler: ConstraintCompiler) -> None:
    first = compiler.compile(StructuredOutput(json_schema={"enum": ["abc", "abd", "x"]}))
    drafts = first.completed(list(b'"ab'), 8)
    assert drafts == tuple(b'"ab')
    first.prepare(drafts)
    behind = [first.after(drafts[: k + 1]).allowed() for k in range(len(drafts))]
    for k, draft in enumerate(drafts):
        assert first.allowed()[draft]
        first.accept(draft)
        if k == 0:
            first.prepare()
        plain = compiler.compile(StructuredOutput(json_schema={"enum": ["abc", "abd", "x"]}))
        for token in drafts[: k + 1]:
            plain.accept(token)
        np.testing.assert_array_equal(behind[k], plain.allowed())
        np.testing.assert_array_equal(first.allowed(), plain.allowed())


def test_a_wrong_draft_leaves_no_mask_behind(compiler: ConstraintCompiler) -> None:
    constraint = compiler.compile(StructuredOutput(choice=("abc", "abd", "xyz")))
    constraint.prepare(tuple(b"ab"))
    assert constraint.allowed()[ord("x")]
    constraint.accept(ord("x"))
    assert np.flatnonzero(constraint.allowed()).tolist() == [ord("y")]
    with pytest.raises(AssertionError, match="has not checked these drafts"):
        constraint.after((ord("y"),))


def test_drafts_end_with_their_budget_and_the_output_continues(compiler: ConstraintCompiler) -> None:
    constraint = compiler.compile(StructuredOutput(choice=("abcdef",)))
    constraint.prepare(tuple(b"abc"))
    assert constraint.allowed()[ord("a")]
    assert constraint.after(tuple(b"abc")).allowed()[ord("d")]
    constraint.accept(ord("a"))
    constraint.budget.charge_drafts(1.0)
    assert constraint.completed((), 4) == ()
    constraint.accept(ord("b"))
    constraint.prepare(tuple(b"cd"))
    assert constraint.allowed()[ord("c")]
    with pytest.raises(ConstraintFailed, match="not yet checked the output up to this token"):
        constraint.after(tuple(b"c")).allowed()
    assert follows(constraint, "cdef")
