from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_harness import Harness, admission_of
from draft_checks import FORMS, random_params, random_prompts
from fakes import FakeCore, byte_tokenizer, small_config
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.outputs import Delta, FinishReason
from octavo.engine.api.prompt import EncodedPrompt
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore

PATTERN = StructuredOutput(regex=r"(a|b)[abc ]{2,6}\n(<.>){1,3}")
THINKER = byte_tokenizer(reasoning_parser="qwen3")


def serve(core: EngineCore, work: list[tuple[list[int], SamplingParams]]) -> list[list[list[Delta]]]:
    admission, found = admission_of(core), {}
    for prompt, params in work:
        data = admission.admit(EncodedPrompt(prompt), params, grammar=admission.compile(params))
        request = core.builder.build(data)
        core.add(request)
        found[request] = [list[Delta]() for _ in range(params.n)]
    while core.has_work:
        for request, delta in core.step():
            found[request][delta.index].append(delta)
    core._blocks.check()
    assert core._blocks.counts.held == 0
    return list(found.values())


def essence(deltas: list[Delta]) -> object:
    return [(d.token_ids, d.text, d.logprobs, d.finish_reason, d.stop_match, d.error) for d in deltas]


def check_every_cut(core: EngineCore, work: list[tuple[list[int], SamplingParams]]) -> int:
    cuts, expected = list[tuple[list[int], SamplingParams]](), []
    for (prompt, params), samples in zip(work, serve(core, work), strict=True):
        for index, deltas in enumerate(samples):
            own = replace(params, n=1, seed=(params.seed or 0) + index)
            for cut in range(1, len(deltas)):
                output = [token for delta in deltas[:cut] for token in delta.token_ids]
                cuts.append((prompt + output, replace(own, num_output_tokens=cut)))
                expected.append(deltas[cut:])
    for request, whole, (got,) in zip(cuts, expected, serve(core, cuts), strict=True):
        assert essence(got) == essence(whole), request
        assert got[0].prompt_tokens == len(request[0])
    return len(cuts)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], SamplingParams]:
    prompt = bytes(draw(st.lists(st.sampled_from(b"ab"), min_size=1, max_size=9)))
    return list(prompt + draw(st.sampled_from([b"", b"<think>\n"]))), SamplingParams(
        max_tokens=draw(st.integers(2, 24)),
        min_tokens=draw(st.sampled_from([0, 0, 2])),
        temperature=draw(st.sampled_from([0, 1])),
        seed=draw(st.integers(0, 3)),
        n=draw(st.integers(1, 2)),
        stop=tuple(draw(st.lists(st.text("abc \n", min_size=1, max_size=3), max_size=2))),
        structured=draw(st.sampled_from([None, PATTERN])),
        max_reasoning_tokens=draw(st.none() | st.integers(0, 6)),
        speculate=draw(st.sampled_from([None, "off"])),
    )


@pytest.mark.property
@settings(max_examples=25)
@given(st.lists(requests(), min_size=1, max_size=3), st.sampled_from([0, 9]), st.booleans())
def test_a_stream_cut_anywhere_equals_the_unbroken_one(
    work: list[tuple[list[int], SamplingParams]], ends_every: int, overlaps: bool
) -> None:
    config = small_config(async_steps=overlaps, speculate="ngram")
    core = FakeCore(ends_every=ends_every, feeds=overlaps, tokenizer=THINKER)(config)
    check_every_cut(core, work)
    core.close()


@pytest.mark.parity
@pytest.mark.parametrize(("model", "kv_format", "residual"), [("demo", "fp4", 1), ("demo-hybrid", "int8", 0)])
def test_a_cut_stream_of_a_model_has_bit_identical_results(model: str, kv_format: str, residual: int) -> None:
    rng = random.Random(f"{model} {kv_format}")
    core = build_core(
        EngineConfig(model=model, kv_format=kv_format, residual_pages=residual, num_pages=200, max_running=16)
    )
    work: list[tuple[list[int], SamplingParams]] = [
        (
            prompt,
            replace(
                random_params(rng, bad_words=("e",) if rng.random() < 0.3 else ()),
                structured=rng.choice(FORMS) if rng.random() < 0.3 else None,
            ),
        )
        for prompt in random_prompts(rng, 12)
    ]
    try:
        assert check_every_cut(core, work) > 100
    finally:
        core.close()


def test_continued_requests_may_fill_the_models_length() -> None:
    harness = Harness(small_config(max_model_len=16))
    params = SamplingParams(seed=1, temperature=1, ignore_eos=True)
    whole = harness.add(b"abcd", params)
    harness.run()
    tokens = harness.result(whole).token_ids
    assert len(tokens) == 12
    rest = harness.add([*b"abcd", *tokens[:11]], replace(params, num_output_tokens=11))
    harness.run()
    assert harness.result(rest).token_ids == tokens[11:]
    assert harness.result(rest).finish_reason is FinishReason.LENGTH
    ended = [record for step in harness.observer.records for record in step.ended]
    assert [record.generated_tokens for record in ended] == [12, 1]


def test_output_that_has_ended_is_not_continued() -> None:
    harness = Harness()
    with pytest.raises(InvalidRequest, match=r"must be less than the number of prompt tokens \(3\), got 3"):
        harness.add(b"abc", SamplingParams(num_output_tokens=3))
    with pytest.raises(InvalidRequest, match=r"must be less than max_tokens \(2\)"):
        SamplingParams(max_tokens=2, num_output_tokens=2)
    with pytest.raises(InvalidRequest, match="must not have an end token, got 99"):
        harness.add(b"abc", SamplingParams(num_output_tokens=1, stop_ids=(99,)))
    with pytest.raises(InvalidRequest, match=r"stop \('bc'\) ended it after 2"):
        harness.add(b"abcd", SamplingParams(num_output_tokens=3, stop=("bc",)))
    harness.assert_idle()
