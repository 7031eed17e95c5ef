from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import VOCAB_SIZE, byte_tokenizer
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.frontend.llm import LLM
from octavo.engine.structured_output.compiler import ConstraintCompiler

pytestmark = pytest.mark.property

LEAVES = st.sampled_from(
    [
        {"type": "integer", "minimum": -20, "maximum": 120},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "green", 3]},
        {"const": "fixed"},
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
    ]
)


def _object(properties: dict[str, Any], required: int) -> dict[str, Any]:
    names = sorted(properties)[:required]
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(
            _object,
            st.dictionaries(st.sampled_from(["a", "b", "name"]), inner, min_size=1, max_size=2),
            st.integers(0, 2),
        )
        | st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)
        | st.builds(lambda *options: {"anyOf": list(options)}, inner, inner)
    ),
    max_leaves=4,
)
DRAWS: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    temperature=st.sampled_from([0.0, 1.0, 2.0]),
    seed=st.integers(0, 2**32),
    n=st.sampled_from([1, 3]),
    top_k=st.sampled_from([0, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 4]),
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(EngineConfig(num_pages=128, page_size=16, max_running=8, max_step_tokens=64)) as made:
        yield made


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made = ConstraintCompiler(byte_tokenizer(), vocab_size=VOCAB_SIZE)
    yield made
    made.close()


@settings(deadline=None, max_examples=25)
@given(schema=SCHEMAS, draw=DRAWS)
def test_json_validates_against_its_schema(llm: LLM, schema: dict[str, Any], draw: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=400, structured=StructuredOutput(json_schema=schema), **draw)
    (output,) = llm.generate("Mara said:", params)
    for completion in output.outputs:
        assert completion.finish_reason is FinishReason.STOP, completion
        jsonschema.validate(json.loads(completion.text), schema)


PATTERNS = st.recursive(
    st.sampled_from(["a", "[b-d]", "é", r"\d", "xyz", " "]),
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})")
        | inner.map(lambda one: f"({one}){{1,3}}")
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=25)
@given(pattern=PATTERNS, draw=DRAWS)
def test_text_matches_its_pattern(llm: LLM, pattern: str, draw: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=300, structured=StructuredOutput(regex=pattern), **draw)
    (output,) = llm.generate("Mara said:", params)
    for completion in output.outputs:
        assert completion.finish_reason is FinishReason.STOP, completion
        assert re.fullmatch(pattern, completion.text), (pattern, completion.text)


@settings(deadline=None, max_examples=15)
@given(
    choices=st.lists(st.text('ab é\n"', min_size=1, max_size=6), min_size=1, max_size=5, unique=True),
    draw=DRAWS,
)
def test_a_choice_is_one_of_them(llm: LLM, choices: list[str], draw: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=100, structured=StructuredOutput(choice=tuple(choices)), **draw)
    (output,) = llm.generate("Mara said:", params)
    assert {completion.text for completion in output.outputs} <= set(choices)


KEYS = st.sampled_from(
    ["type", "items", "properties", "$ref", "$defs", "anyOf", "allOf", "oneOf", "not", "enum", "const",
     "pattern", "minLength", "maxLength", "minimum", "required", "additionalProperties", "prefixItems",
     "format", "a"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text('ab#/$"\\\ud800', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
TAGS = st.fixed_dictionaries(
    {},
    optional={
        "triggers": JSON | st.just(["<"]),
        "structures": JSON
        | st.lists(
            st.fixed_dictionaries(
                {}, optional={"begin": JSON | st.just("<a>"), "schema": JSON, "end": JSON | st.just("</a>")}
            ),
            max_size=2,
        ),
    },
)
GRAMMARS = st.lists(
    st.sampled_from(
        ["start", "root", "x", "T", ":", "::=", "|", "(", ")", '"a"', "/b+/", "*", "?", "%json", "{", "}",
         "[", "%regex", "%ignore", "&", "~", "\n", "[^a]", "=", ";", "é", "\ud800", "\0"]
    ),
    max_size=14,
).map(" ".join)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(
    source=st.one_of(
        st.builds(lambda value: StructuredOutput(json_schema=json.dumps(value)), JSON),
        st.builds(lambda value: StructuredOutput(structural_tag=json.dumps(value)), JSON | TAGS),
        st.builds(lambda text: StructuredOutput(grammar=text), GRAMMARS),
        st.builds(lambda text: StructuredOutput(regex=text), st.text(r"ab(|)*[]{}?+\pL,019é^$.")),
    )
)
def test_whatever_is_sent_is_compiled_or_refused(
    compiler: ConstraintCompiler, source: StructuredOutput
) -> None:
    try:
        constraint = compiler.compile(source)
    except InvalidRequest as error:
        refusal = str(error)
    else:
        assert constraint.allowed().any()
        return
    assert refusal.startswith(f"{source.kind} cannot be used: ")
    assert "\n" not in refusal


def test_constrained_and_free_prompts_share_a_batch(llm: LLM) -> None:
    free = SamplingParams(max_tokens=12)
    alone = [output.outputs[0].text for output in llm.generate(["Once", "There was"], free)]
    bound = SamplingParams(max_tokens=50, structured=StructuredOutput(regex="[0-9]{12}"))
    together = llm.generate(["Once", "Once", "There was"], [free, bound, free])
    assert [output.outputs[0].text for output in (together[0], together[2])] == alone
    assert re.fullmatch("[0-9]{12}", together[1].outputs[0].text)
