"""Sampling on the device with MLX operations, as part of the step's graph.

With equal logits and random numbers, the tokens equal those of ``sampler.sample``. A device may round
differently. If rounding could change the token, the row is UNSURE and the host samples it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .sampler import SampleState

SURE, UNSURE, FAILED = 0, 1, 2

BLOCK = 512
ROUNDING = 2.0**-24  # relative error of one float32 operation
WEIGHT_ERROR = 2.0**-13  # largest relative difference between two computations of a weight
UNLIMITED = np.iinfo(np.int32).max
TINY = 2.0**-100  # smaller weights may be flushed to 0

Floats32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    greedy: npt.NDArray[np.bool_]
    temperature: Floats32
    uniform: Floats32
    top_k: npt.NDArray[np.int32]
    top_p: Floats32
    min_p: Floats32

    @property
    def sorts(self) -> bool:
        return bool((self.top_p < 1).any() or (self.top_k < UNLIMITED).any())


def sampling_arrays(states: Sequence[SampleState]) -> SamplingArrays | None:
    """Return the parameters for the next token of each state; None if all are greedy."""
    assert all(state.is_unprocessed for state in states), "sampling on the device takes unmodified logits"
    if all(state.greedy for state in states):
        return None
    params = [state.params for state in states]
    return SamplingArrays(
        greedy=np.array([state.greedy for state in states]),
        temperature=np.array([1 if s.greedy else s.params.temperature for s in states], np.float32),
        uniform=np.array([0 if s.greedy else s.uniform() for s in states], np.float32),
        top_k=np.array(
            [min(each.top_k, UNLIMITED) if each.top_k > 0 else UNLIMITED for each in params], np.int32
        ),
        top_p=np.array([each.top_p for each in params], np.float32),
        min_p=np.array([each.min_p for each in params], np.float32),
    )


def draw_tokens(logits: mx.array, arrays: SamplingArrays | None) -> mx.array:
    """Return tokens and verdicts, int32 [2, S], for logits [S, V]; not evaluated.

    A verdict is SURE, UNSURE or FAILED (the row is not finite).
    """
    x = logits.astype(mx.float32)
    largest = mx.max(x, axis=1)
    failed = mx.logical_or(mx.any(mx.isnan(x), axis=1), mx.logical_not(mx.isfinite(largest)))
    tokens = mx.argmax(x, axis=1).astype(mx.int32)
    verdicts = mx.zeros_like(tokens)
    if arrays is not None:
        drawn, unsure = _sample(x, largest[:, None], arrays)
        greedy = mx.array(arrays.greedy)
        tokens = mx.where(greedy, tokens, drawn)
        verdicts = mx.where(mx.logical_and(unsure, mx.logical_not(greedy)), UNSURE, SURE)
    verdicts = mx.where(failed, FAILED, verdicts)
    return mx.stack([mx.clip(tokens, 0, x.shape[1] - 1), verdicts.astype(mx.int32)])


def _sample(x: mx.array, largest: mx.array, arrays: SamplingArrays) -> tuple[mx.array, mx.array]:
    temperature = mx.array(arrays.temperature)[:, None]
    weights = mx.exp((x - largest) / temperature)
    kept = mx.ones_like(x, dtype=mx.bool_)
    unsure = mx.zeros(x.shape[:1], dtype=mx.bool_)
    min_p = None
    if (arrays.min_p > 0).any():
        min_p = mx.array(arrays.min_p)[:, None]
        near = mx.logical_and(mx.abs(weights - min_p) <= WEIGHT_ERROR * min_p, min_p > 0)
        unsure = mx.logical_or(mx.any(near, axis=1), mx.logical_and(min_p > 0, min_p < TINY)[:, 0])
        kept = weights >= min_p
    if arrays.sorts:
        ordered = -mx.sort(-x, axis=1)
        last = mx.array(np.minimum(arrays.top_k, x.shape[1]) - 1)[:, None]
        smallest = mx.take_along_axis(ordered, last, axis=1)
        kept = mx.logical_and(kept, x >= smallest)
        if (arrays.top_p < 1).any():
            in_order = mx.where(ordered >= smallest, mx.exp((ordered - largest) / temperature), 0.0)
            if min_p is not None:
                in_order = mx.where(in_order >= min_p, in_order, 0.0)
            nucleus, blurred = _nucleus(x, ordered, in_order, mx.array(arrays.top_p)[:, None])
            kept = mx.logical_and(kept, nucleus)
            unsure = mx.logical_or(unsure, blurred)
    sums, total = _running_sums(mx.where(kept, weights, 0.0))
    error = _sum_error(x.shape[1]) * total
    target = mx.array(arrays.uniform)[:, None] * total
    before = _count(sums <= target - error)
    unsure = mx.logical_or(unsure, before != _count(sums <= target + error))
    return before, unsure


def _nucleus(x: mx.array, ordered: mx.array, weights: mx.array, top_p: mx.array) -> tuple[mx.array, mx.array]:
    size = x.shape[1]
    sums, total = _running_sums(weights)
    target, error = top_p * total, _sum_error(size) * total
    index = _count(sums < target - error)
    unsure = index != _count(sums < target + error)
    index = mx.minimum(index, size - 1)[:, None]
    cut = mx.take_along_axis(ordered, index, axis=1)
    first, behind = _count(ordered > cut)[:, None], _count(ordered >= cut)[:, None]
    weight = mx.take_along_axis(weights, index, axis=1)
    above = mx.take_along_axis(weights, mx.maximum(first - 1, 0), axis=1)
    below = mx.take_along_axis(weights, mx.minimum(behind, size - 1), axis=1)
    merges_above = mx.logical_and(first > 0, above <= weight * (1 + WEIGHT_ERROR))
    merges_below = mx.logical_and(behind < size, below >= weight * (1 - WEIGHT_ERROR))
    blurred = mx.logical_or(mx.logical_or(merges_above, merges_below), weight < TINY)[:, 0]
    ties = x == cut
    place = mx.cumsum(ties.astype(mx.int32), axis=1)
    kept = mx.logical_or(x > cut, mx.logical_and(ties, place <= index - first + 1))
    whole = top_p >= 1
    return mx.logical_or(kept, whole), mx.logical_and(
        mx.logical_or(unsure, blurred), mx.logical_not(whole[:, 0])
    )


def _running_sums(weights: mx.array) -> tuple[mx.array, mx.array]:
    rows, size = weights.shape
    blocks = -(-size // BLOCK)
    padded = mx.pad(weights, [(0, 0), (0, blocks * BLOCK - size)]).reshape(rows, blocks, BLOCK)
    inside = mx.cumsum(padded, axis=2)
    ends = mx.cumsum(inside[:, :, -1], axis=1)
    starts = mx.pad(ends[:, :-1], [(0, 0), (1, 0)])
    sums = (inside + starts[:, :, None]).reshape(rows, -1)[:, :size]
    return sums, ends[:, -1:]


def _sum_error(size: int) -> float:
    return 2 * ((min(size, BLOCK) + -(-size // BLOCK)) * ROUNDING + 2.0**-18)


def _count(mask: mx.array) -> mx.array:
    return mx.sum(mask.astype(mx.int32), axis=1)
