from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor.sampling.sampler import SampleState, sample
from octavo.engine.executor.sampling.truncation import Floats

LOGITS = np.log(np.array([[0.1, 0.4, 0.05, 0.25, 0.2]], np.float32))


def state(*, prompt: tuple[int, ...] = (), seed: int = 0, **params: object) -> SampleState:
    return SampleState(SamplingParams(**params), seed=seed, prompt_ids=prompt, vocab_size=5)  # type: ignore[arg-type]


def test_end_tokens_are_not_sampled_before_min_tokens() -> None:
    one = SampleState(
        SamplingParams(min_tokens=2, logprobs=1), seed=0, prompt_ids=[], vocab_size=5, end_ids={1, 99}
    )
    for expected in (3, 3, 1):
        [drawn] = sample(LOGITS, [one])
        assert drawn.token == expected
        assert drawn.logprob is not None
        assert drawn.logprob.top[0][0] == expected, "logprobs speak of what could be drawn"
        one.record(expected)
    plain = SampleState(SamplingParams(min_tokens=2), seed=0, prompt_ids=[], vocab_size=5, end_ids={1})
    assert not plain.is_argmax
    plain.record(3)
    plain.record(3)
    assert plain.is_argmax


def test_penalties_use_the_prompt_only_for_repetition() -> None:
    row = np.array([[2.0, 1.9, -1.0]], np.float32)

    def drawn(**params: float) -> Floats:
        one = SampleState(SamplingParams(**params), seed=0, prompt_ids=[0], vocab_size=3)  # type: ignore[arg-type]
        for token in (2, 2):
            one.record(token)
        adjusted: Floats = row[0].copy()
        one.adjust_in_place(adjusted)
        return adjusted

    np.testing.assert_allclose(drawn(repetition_penalty=2.0), [1.0, 1.9, -2.0])
    np.testing.assert_allclose(drawn(presence_penalty=0.5), [2.0, 1.9, -1.5])
    np.testing.assert_allclose(drawn(frequency_penalty=0.5), [2.0, 1.9, -2.0])
    one = SampleState(SamplingParams(repetition_penalty=2.0), seed=0, prompt_ids=[0], vocab_size=3)
    assert sample(row, [one])[0].token == 1
    assert row[0].tolist() == pytest.approx([2.0, 1.9, -1.0]), "the model's logits must stay as they were"


def test_counts_keep_up_with_many_tokens() -> None:
    one = SampleState(SamplingParams(frequency_penalty=1.0), seed=0, prompt_ids=[], vocab_size=500)
    for token in list(range(300)) * 2:
        one.record(token)
    adjusted = np.zeros(500, np.float32)
    one.adjust_in_place(adjusted)
    assert (adjusted[:300] == -2).all()
    assert (adjusted[300:] == 0).all()


def test_logit_bias_moves_the_greedy_choice_and_must_name_tokens() -> None:
    assert sample(LOGITS, [state(logit_bias={2: 50.0})])[0].token == 2
    with pytest.raises(InvalidRequest, match=r"token ids in \[0, 5\), got 5"):
        state(logit_bias={5: 1.0})


def test_bad_words_forbid_their_last_token_after_the_others() -> None:
    one = SampleState(SamplingParams(), seed=0, prompt_ids=[2], vocab_size=5, bad_ids=[(1,), (2, 3)])

    def forbidden(state: SampleState) -> list[int]:
        adjusted = np.zeros(5, np.float32)
        state.adjust_in_place(adjusted)
        return np.flatnonzero(np.isinf(adjusted)).tolist()

    assert forbidden(one) == [1], "the prompt is no output"
    assert forbidden(one.after((2,))) == [1, 3]
    assert not one.is_foreseen
    one.record(2)
    assert forbidden(one) == [1, 3]
    one.record(4)
    assert forbidden(one) == [1]
    assert sample(LOGITS, [one])[0].token == 3


def test_only_listed_tokens_are_sampled() -> None:
    for temperature in (0.0, 1.0):
        one = state(allowed_token_ids=(0, 2), temperature=temperature)
        assert sample(LOGITS, [one])[0].token in (0, 2)
    assert one.is_foreseen
    assert not one.is_argmax


def test_logprobs_are_those_before_temperature_and_truncation() -> None:
    (drawn,) = sample(LOGITS, [state(temperature=0.1, top_k=1, logprobs=3)])
    assert drawn.logprob is not None
    assert drawn.logprob.token_id == 1
    assert drawn.logprob.logprob == pytest.approx(math.log(0.4), abs=1e-6)
    assert [token for token, _ in drawn.logprob.top] == [1, 3, 4]
    assert [p for _, p in drawn.logprob.top] == pytest.approx(
        [math.log(x) for x in (0.4, 0.25, 0.2)], abs=1e-6
    )
    assert sample(LOGITS, [state(logprobs=0)])[0].logprob is not None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    rows = np.repeat(LOGITS, 3, axis=0)
    rows[1, 2] = bad
    good, failed, last = sample(rows, [state(), state(), state(temperature=1.0)])
    assert good.token == 1
    assert failed.token is None
    assert failed.error is not None
    assert "not finite" in failed.error
    assert last.token is not None


def test_plain_greedy_is_only_plain_greedy() -> None:
    assert state().is_argmax
    for params in (
        {"logprobs": 0},
        {"temperature": 1.0},
        {"logit_bias": {1: 1.0}},
        {"presence_penalty": 1.0},
    ):
        assert not state(**params).is_argmax
    assert not state(repetition_penalty=1.1).is_argmax
