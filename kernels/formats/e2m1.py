"""E2M1, the 4-bit float of OCP Microscaling v1.0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .base import Floats

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Values of codes 0..7; codes 8..15 are their negatives."""

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


def signed_codes(rows: Floats, index: NDArray[np.uint8], scale: Floats) -> NDArray[np.uint8]:
    """Return codes [..., D]: the index plus 8 if negative (also for -0.0); all 0 if the scale is 0."""
    codes = index | np.signbit(rows).astype(np.uint8) << np.uint8(3)
    return np.where(scale == 0, np.uint8(0), codes)


def values_of(codes: NDArray[np.uint8]) -> Floats:
    """Return the float32 values of codes 0 to 15; code 8 is -0.0."""
    values: Floats = MAGNITUDES[codes & 7]
    return np.where(codes & 8, -values, values)
