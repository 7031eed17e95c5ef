"""E2M1, the 4-bit float of OCP Microscaling v1.0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .base import Array, Bools, Floats
from .packing import tree_sum

Candidate = tuple[Array, Floats, Bools]
"""Scale of each row as it is stored, its value, and whether the row may have it."""

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Values of codes 0..7; codes 8..15 are their negatives."""

_VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])

# Boundaries of |x| / scale between neighbouring magnitudes, and whether a tie takes the upper index.
EDGES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def nearest_index(
    magnitudes: Floats, scale: Floats, edges: Sequence[tuple[float, bool]] = EDGES
) -> NDArray[np.uint8]:
    """Return the index of the magnitude nearest to ``magnitudes / scale``, ties to even.

    The result is exact. For scale 0 it is the largest index.
    """
    index = np.zeros(magnitudes.shape, np.uint8)
    for edge, tie_moves in edges:
        limit = scale * np.float32(edge)
        index += magnitudes >= limit if tie_moves else magnitudes > limit
    return index


def best_scale(
    candidates: Iterable[Candidate],
    magnitudes: Floats,
    nearest: Callable[[Floats, Floats], NDArray[np.uint8]] = nearest_index,
    values: Floats = MAGNITUDES,
) -> tuple[Array, NDArray[np.uint8]]:
    """Return each row's candidate of least squared error, the first of equals, and the indices of values."""
    best: Array = np.zeros(1, np.uint8)
    error: Floats = np.full(1, np.inf, np.float32)
    indices = np.zeros(1, np.uint8)
    with np.errstate(under="ignore", over="ignore"):
        for stored, scale, usable in candidates:
            index = nearest(magnitudes, scale)
            difference = magnitudes - scale * values[index]
            own = tree_sum(difference * difference)
            # If a sum overflows to infinity, the first usable candidate must still be taken.
            better = usable & ((best == 0) | (own < error))
            best = np.where(better, stored, best.astype(stored.dtype))
            error, indices = np.where(better, own, error), np.where(better, index, indices)
    return best, indices


def signed_codes(rows: Floats, index: NDArray[np.uint8], scale: Floats) -> NDArray[np.uint8]:
    """Return codes [..., D]: the index plus 8 if negative (also for -0.0); all 0 if the scale is 0."""
    codes = index | np.signbit(rows).astype(np.uint8) << np.uint8(3)
    return np.where(scale == 0, np.uint8(0), codes)


def values_of(codes: NDArray[np.uint8]) -> Floats:
    """Return the float32 values of codes 0 to 15; code 8 is -0.0."""
    values: Floats = _VALUES[codes]
    return values
