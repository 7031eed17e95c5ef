from __future__ import annotations

import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.scheduler import Limits
from octavo.scheduler.step_cost import (
    _DECAY,
    _MAX_COVARIANCE,
    _PRIOR,
    StepCost,
    _terms,
    with_chunk,
    with_drafts,
)
from octavo.scheduler.types import StepShape
from step_times import machine


@given(
    st.lists(
        st.tuples(st.integers(0, 64), st.integers(0, 512), st.integers(0, 100_000)), min_size=1, max_size=60
    )
)
@settings(max_examples=100)
def test_predictions_never_shrink_with_the_step(steps: list[tuple[int, int, int]]) -> None:
    cost = StepCost()
    for decodes, chunk, positions in steps:
        shape = StepShape(decodes, chunk, positions, chunk * 100)
        cost.observe(shape, machine(shape))
        assert cost.predict(shape) >= 0
        assert cost.predict(with_chunk(shape, 500, 64)) >= cost.predict(shape)


def test_observed_costs_are_predicted() -> None:
    cost, rng = StepCost(), random.Random(2)
    shapes = [
        StepShape(rng.randrange(1, 33), rng.choice((0, 64, 256)), rng.randrange(20_000), 0)
        for _ in range(300)
    ]
    for shape in shapes:
        cost.observe(shape, machine(shape) * rng.uniform(0.95, 1.05))
    for shape in shapes[-50:]:
        assert cost.predict(shape) == pytest.approx(machine(shape), rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none_teach_nothing(seconds: float) -> None:
    cost = StepCost()
    cost.observe(StepShape(1, 0, 10, 0), seconds)
    assert cost.predict(StepShape(1, 0, 10, 0)) == 0


def test_a_step_of_decodes_alone_fills_no_tile() -> None:
    cost = StepCost(16)
    for rows in range(1, 9):
        for _ in range(20):
            cost.observe(StepShape(rows, 0, 0, 0), 0.01 * rows)
    assert cost.predict(StepShape(2, 0, 0, 0)) == pytest.approx(0.02, rel=0.05)


def test_a_tile_of_no_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="row_tile must be at least 1, got 0"):
        Limits(row_tile=0)


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_equal_row_counts_do_not_inflate_the_cost_of_rows(rows: int) -> None:
    def seconds(shape: StepShape) -> float:
        return machine(shape) + 0.013  # 28 ms, and 0.8 ms for each row

    shares, errors = [], []
    for seed in range(7):
        cost, rng = StepCost(), random.Random(seed)
        chunk = with_chunk(StepShape(0, 0, 0, 0), 0, 512)
        for shape in (*[chunk] * 4, *(StepShape(rows, 0, rows * (100 + step), 0) for step in range(400))):
            cost.observe(shape, seconds(shape) * rng.uniform(0.85, 1.15))
        shares.append(cost.predict(with_drafts(shape, 500, 1)) / cost.predict(shape) - 1)
        errors.append(cost.predict(shape) / seconds(shape) - 1)
    assert abs(statistics.median(errors)) < 0.05
    assert 0.3 * 0.0008 / 0.028 < statistics.median(shares) < 2 * 0.0008 / (0.028 + 0.0008 * rows)


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.sampled_from((0, 0, 64, 300)), st.floats(0.001, 1.0)),
        min_size=1,
        max_size=40,
    )
)
def test_the_fit_is_that_of_recursive_least_squares(steps: list[tuple[int, int, float]]) -> None:
    """The reference is the matrix form of the formula."""
    cost = StepCost()
    weights, covariance = np.zeros(5), np.eye(5) / _PRIOR
    for decodes, chunk, seconds in steps:
        shape = with_chunk(StepShape(decodes, 0, decodes * 300, 0), 100, chunk)
        cost.observe(shape, seconds)
        x = np.array(_terms(shape, 1)) / seconds
        px = covariance @ x
        gain = _DECAY + x @ px
        weights = weights + px * (1.0 - weights @ x) / gain
        covariance = (covariance - np.outer(px, px) / gain) / _DECAY
        if min(weights) < 0 or covariance.diagonal().max() > _MAX_COVARIANCE:
            return
        lower = covariance[np.tril_indices(5)]
        np.testing.assert_allclose(cost._covariance, lower, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(cost._weights, weights, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("term", range(5))
def test_a_coefficient_below_zero_counts_as_none(term: int) -> None:
    cost, shape = StepCost(), StepShape(16, 64, 8192, 65536)
    cost._weights = [1.0] * 5
    cost._weights[term] = -1.0
    assert cost.predict(shape) == 4.0
