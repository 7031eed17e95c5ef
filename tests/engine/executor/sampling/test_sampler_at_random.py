from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor.sampling.sampler import SampleState, sample
from octavo.engine.executor.sampling.truncation import Candidates, Floats, nucleus, truncate

pytestmark = pytest.mark.property

CLOSE = 1e-5  # distance from a boundary within which float32 and float64 may differ


def naive(
    logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[set[int], set[int]]:
    """Return (tokens that truncation must leave, tokens that it may leave), by sorting in float64."""
    scaled = (logits.astype(np.float64) - float(logits.max())) / temperature
    must, may = np.ones(len(logits), bool), np.ones(len(logits), bool)
    weights = np.exp(scaled)
    if min_p > 0:
        must &= weights >= min_p * (1 + CLOSE)
        may &= weights >= min_p * (1 - CLOSE)
        must[np.argmax(weights)] = True
    if 0 < top_k < int(may.sum()):
        kth = np.sort(weights[may])[::-1][top_k - 1]
        must &= weights >= kth
        may &= weights >= kth * (1 - CLOSE)
    if top_p < 1:
        least, most = (_prefix(weights, mask, top_p, slack) for mask, slack in ((must, -CLOSE), (may, CLOSE)))
        must, may = must & least, may & most
    return set(np.flatnonzero(must).tolist()), set(np.flatnonzero(may).tolist())


def _prefix(
    weights: NDArray[np.float64], mask: NDArray[np.bool_], p: float, slack: float
) -> NDArray[np.bool_]:
    weights = np.where(mask, weights, 0)
    order = np.argsort(-weights, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(weights[order])[:-1]])
    kept = np.zeros(len(weights), bool)
    kept[order[before < (p + slack) * weights.sum()]] = True
    return kept & mask


@st.composite
def rows(draw: st.DrawFn) -> Floats:
    size = draw(st.sampled_from([1, 2, 7, 100, 5000, 20_000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = (rng.standard_normal(size) * draw(st.sampled_from([0.0, 0.3, 2.0, 8.0]))).astype(np.float32)
    if draw(st.booleans()):
        row = np.round(row)
    if size > 1 and draw(st.booleans()):
        row[rng.random(size) < 0.3] = -np.inf
        row[rng.integers(size)] = 0
    return row


@given(
    row=rows(),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 6000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
@example(row=np.zeros(20_000, np.float32), temperature=1.0, top_k=0, top_p=0.5, min_p=0.0)
def test_supports_are_those_of_a_naive_sampler(
    row: Floats, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    got = truncate(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids = np.arange(len(row)) if got.ids is None else got.ids
    assert (np.diff(ids) > 0).all()
    must, may = naive(row, temperature, top_k, top_p, min_p)
    support = {int(token) for token, weight in zip(ids, got.weights, strict=True) if weight > 0}
    possible = {token for token in may if row[token] > -np.inf}
    if top_p == 1:
        assert support <= possible
        assert {t for t in must if row[t] > row.max() - 80 * temperature} <= support
    else:
        assert len(support - possible) <= np.ceil(CLOSE * len(row))
        assert len({t for t in must if row[t] > row.max() - 80 * temperature} - support) <= np.ceil(
            CLOSE * len(row)
        )


@given(row=rows(), p=st.floats(1e-6, 0.999999))
def test_the_nucleus_is_the_smallest_that_reaches_p(row: Floats, p: float) -> None:
    weights = np.exp(row - row.max())
    kept = nucleus(weights, p)
    exact = weights.astype(np.float64)
    target = p * exact.sum()
    assert kept.any()
    assert exact[kept].sum() >= target * (1 - 1e-9)
    assert exact[kept].sum() - exact[kept].min() < target * (1 + 1e-9)
    assert kept.all() or exact[kept].min() >= exact[~kept].max()


def draws(row: Floats, num: int, **params: object) -> NDArray[np.int64]:
    states = [
        SampleState(SamplingParams(**params), seed=seed, prompt_ids=[], vocab_size=len(row))  # type: ignore[arg-type]
        for seed in range(num)
    ]
    tokens = [drawn.token for drawn in sample(np.tile(row, (num, 1)), states)]
    return np.bincount(np.array(tokens, np.int64), minlength=len(row))


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.7}], ids=str
)
def test_samples_follow_the_truncated_softmax(params: dict[str, float]) -> None:
    """Chi-square over fixed seeds: 37.7 is the 99.99 % quantile for 11 degrees of freedom."""
    row = np.linspace(-1, 1.5, 12).astype(np.float32)
    temperature, num = 0.8, 4000
    settings: dict[str, float] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    must, may = naive(row, temperature, int(settings["top_k"]), settings["top_p"], settings["min_p"])
    assert must == may
    expected = np.exp(row.astype(np.float64) / temperature)
    expected[[token for token in range(12) if token not in must]] = 0
    expected *= num / expected.sum()
    observed = draws(row, num, temperature=temperature, **params)
    assert (observed[expected == 0] == 0).all()
    some = expected > 0
    assert ((observed - expected)[some] ** 2 / expected[some]).sum() < 37.7


def test_successive_samples_of_one_seed_follow_the_softmax_too() -> None:
    row = np.log(np.array([1, 2, 3, 4], np.float32))
    one = SampleState(SamplingParams(temperature=1.0), seed=11, prompt_ids=[], vocab_size=4)
    counts = np.zeros(4)
    for _ in range(4000):
        token = sample(row[None], [one])[0].token
        assert token is not None
        counts[token] += 1
        one.record(token)
    expected = np.array([400, 800, 1200, 1600])
    assert ((counts - expected) ** 2 / expected).sum() < 21.1  # 99.99 %, 3 degrees of freedom


@given(
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6),
    generated=st.integers(0, 3),
    picked=st.integers(0, 5),
)
def test_a_draw_depends_on_seed_and_count_and_not_on_neighbours(
    seeds: list[int], generated: int, picked: int
) -> None:
    rng = np.random.default_rng(len(seeds))
    logits = rng.standard_normal((len(seeds), 50)).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2)

    def fresh(seed: int) -> SampleState:
        one = SampleState(params, seed=seed, prompt_ids=[1, 2], vocab_size=50)
        for token in range(generated):
            one.record(token)
        return one

    together = sample(logits, [fresh(seed) for seed in seeds])
    index = picked % len(seeds)
    assert sample(logits[index : index + 1], [fresh(seeds[index])])[0] == together[index]


@given(st.integers(1, 3000), st.integers(0, 2**32), st.floats(0, 1, exclude_max=True))
@example(1024, 0, 0.0)
@example(1025, 1, 1 - 2**-53)
def test_the_sampled_token_is_where_the_running_sum_passes(size: int, seed: int, uniform: float) -> None:
    rng = np.random.default_rng(seed)
    weights = (rng.integers(0, 8, size) * (rng.random(size) < 0.2)).astype(np.float32)
    weights[rng.integers(size)] = 1
    drawn = Candidates(None, weights).sample(uniform)
    cumulative = np.cumsum(weights, dtype=np.float64)
    assert weights[drawn] > 0
    assert cumulative[drawn] >= uniform * cumulative[-1]
    assert cumulative[drawn] - weights[drawn] <= uniform * cumulative[-1]
