from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor.sampling import device_sampling
from octavo.engine.executor.sampling.device_sampling import FAILED, SURE, UNSURE, draw_tokens, sampling_arrays
from octavo.engine.executor.sampling.sampler import SampleState, sample

pytestmark = pytest.mark.parity

NUM_ROWS = 24


def random_states(rng: np.random.Generator, vocab_size: int, count: int = NUM_ROWS) -> list[SampleState]:
    return [
        SampleState(
            SamplingParams(
                temperature=float(rng.choice([0, 0.01, 0.3, 0.7, 1, 1.5])),
                top_k=int(rng.choice([0, 0, 1, 5, 50, vocab_size, vocab_size + 9])),
                top_p=float(rng.choice([1, 1, 0.95, 0.9, 0.5, 0.01])),
                min_p=float(rng.choice([0, 0, 0.001, 0.05, 0.5])),
            ),
            seed=int(rng.integers(2**63)),
            prompt_ids=[],
            vocab_size=vocab_size,
        )
        for _ in range(count)
    ]


def compare(logits: mx.array, states: list[SampleState]) -> tuple[int, int]:
    host = sample(iter(np.array(logits.astype(mx.float32))), states)
    tokens, verdicts = np.array(draw_tokens(logits, sampling_arrays(states))).tolist()
    for token, verdict, expected, state in zip(tokens, verdicts, host, states, strict=True):
        assert verdict != FAILED
        assert verdict == UNSURE or token == expected.token, state.params
    return verdicts.count(SURE), verdicts.count(UNSURE)


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([1, 2, 7, 256, 511, 512, 513, 1025, 4000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 3.0, 10.0, 100.0]),
    dtype=st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
)
def test_tokens_are_the_hosts(seed: int, vocab_size: int, spread: float, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((NUM_ROWS, vocab_size)) * spread
    rows[::5] = np.round(rows[::5])  # ties
    rows[::7, rng.random(vocab_size) < 0.3] = -np.inf
    rows[:, rng.integers(vocab_size)] = spread
    compare(mx.array(rows.astype(np.float32)).astype(dtype), random_states(rng, vocab_size))


@pytest.mark.parametrize("dtype", [mx.bfloat16])
def test_few_rows_of_a_large_vocabulary_are_unsure(dtype: mx.Dtype) -> None:
    """A few tokens have most of the probability, as in a language model."""
    rng, vocab_size = np.random.default_rng(3), 151_936
    sure = unsure = 0
    for _ in range(3):
        rows = rng.standard_normal((NUM_ROWS, vocab_size)).astype(np.float32)
        rows[:, rng.integers(vocab_size, size=40)] += rng.uniform(8, 16, (NUM_ROWS, 40)).astype(np.float32)
        counts = compare(mx.array(rows).astype(dtype), random_states(rng, vocab_size))
        sure, unsure = sure + counts[0], unsure + counts[1]
    assert unsure <= 0.1 * sure


def test_equality_depends_on_the_error_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, vocab_size = np.random.default_rng(1), 600
    running_sums = device_sampling._running_sums

    def worse(weights: mx.array) -> tuple[mx.array, mx.array]:
        sums, total = running_sums(weights)
        error = 0.4 * device_sampling._sum_error(vocab_size)
        return sums + total * mx.random.uniform(-error, error, sums.shape), total

    monkeypatch.setattr(device_sampling, "_running_sums", worse)
    mx.random.seed(0)
    rows = mx.array(rng.standard_normal((300, vocab_size)).astype(np.float32))
    states = random_states(rng, vocab_size, 300)
    compare(rows, states)
    monkeypatch.setattr(device_sampling, "_sum_error", lambda size: 0.0 * size)
    error = 2.0**-11
    monkeypatch.setattr(
        device_sampling,
        "_running_sums",
        lambda weights: (
            running_sums(weights)[0] + mx.random.uniform(-error, error, weights.shape),
            running_sums(weights)[1],
        ),
    )
    with pytest.raises(AssertionError):
        compare(rows, states)
