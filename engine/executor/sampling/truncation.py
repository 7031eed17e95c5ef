"""Truncation of logits and sampling in NumPy, without sorting the whole vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]

_SMALL = 4096
_BLOCK = 512
_STRIDE_SAMPLE = 512


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may be sampled, with weights. If ``ids`` is None, every token may be sampled."""

    ids: Ids | None
    weights: Floats

    def only(self, kept: NDArray[Any]) -> Candidates:
        if kept.dtype == np.bool_:
            kept = np.flatnonzero(kept)
        return Candidates(kept if self.ids is None else self.ids[kept], self.weights[kept])

    def sample(self, uniform: float) -> int:
        """Sample a token with the random number ``uniform`` in [0, 1)."""
        start, weights = 0, self.weights
        size = len(weights) // _BLOCK * _BLOCK
        if size > _BLOCK:  # a running sum of a whole vocabulary is slow
            blocks = weights[:size].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
            sums = np.append(blocks, weights[size:].sum(dtype=np.float64))
            ends = np.cumsum(sums)
            target = uniform * float(ends[-1])
            block = _first_beyond(ends, target)
            start = block * _BLOCK
            weights = weights[start : start + _BLOCK]
            target = max(0.0, target - float(ends[block] - sums[block]))  # negative only by rounding
        else:
            target = uniform * float(weights.sum(dtype=np.float64))
        index = start + _first_beyond(np.cumsum(weights, dtype=np.float64), target)
        return index if self.ids is None else int(self.ids[index])


def _first_beyond(cumulative: NDArray[np.float64], target: float) -> int:
    index = int(np.searchsorted(cumulative, target, side="right"))
    if index == len(cumulative):
        index = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return index


def truncate(logits: Floats, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Candidates:
    """Truncate logits [V] in vLLM's order: temperature, min_p, top_k, top_p.

    min_p   keeps tokens at least min_p times as likely as the likeliest
    top_k   keeps the k largest remaining tokens, and ties with the smallest of them
    top_p   keeps the smallest set whose share of the remaining weight reaches p; the lower id wins ties
    """
    ids: Ids | None = None
    largest = logits.max()
    if 0 < top_k < len(logits):
        ids = np.flatnonzero(logits >= np.partition(logits, -top_k)[-top_k])
        logits = logits[ids]
    with np.errstate(over="ignore", under="ignore"):  # at low temperatures all but the top underflow to 0
        candidates = Candidates(ids, np.exp((logits - largest) / np.float32(temperature)))
    if min_p > 0:
        candidates = candidates.only(candidates.weights >= np.float32(min_p))
    if top_p < 1:
        candidates = candidates.only(nucleus(candidates.weights, top_p))
    return candidates


def nucleus(weights: Floats, p: float) -> NDArray[Any]:
    """Return a mask of the fewest weights whose sum reaches p times the total."""
    target = p * float(weights.sum(dtype=np.float64))
    last, num_ties = _last_kept(weights, target)
    kept = weights > last
    kept[np.flatnonzero(weights == last)[:num_ties]] = True
    return kept


def _last_kept(weights: Floats, target: float) -> tuple[np.float32, int]:
    taken, quantile = 0.0, max(0.5, 1 - _SMALL / (2 * len(weights)))
    while len(weights) > _SMALL:
        sample = weights[:: -(-len(weights) // _STRIDE_SAMPLE)]
        rank = int(quantile * (len(sample) - 1))
        pivot = np.partition(sample, rank)[rank]
        above = weights[weights > pivot]
        mass = float(above.sum(dtype=np.float64))
        if taken + mass >= target:
            weights = above
        elif len(above):
            taken += mass
            weights = weights[weights <= pivot]
        else:
            break
        quantile = 0.5
    ordered = np.sort(weights)[::-1]
    reached = np.searchsorted(taken + np.cumsum(ordered, dtype=np.float64), target, side="left")
    index = min(int(reached), len(ordered) - 1)
    last = ordered[index]
    first_tie = int(np.searchsorted(-ordered, -last, side="left"))
    return last, index - first_tie + 1
