"""The sum of a row in an order that every backend can follow."""

from __future__ import annotations

import numpy as np

from .base import Floats


def tree_sum(values: Floats) -> Floats:
    """Return the sum over the last axis, [..., D] -> [..., 1], in a fixed order. The row is zero-padded to P,
    a power of two. Then the upper half is added to the lower half, P/2, P/4, ..., 1, with one rounding per
    addition."""
    width = 1 << (values.shape[-1] - 1).bit_length()
    if width != values.shape[-1]:
        padding = [(0, 0)] * (values.ndim - 1) + [(0, width - values.shape[-1])]
        values = np.pad(values, padding)
    while width > 1:
        width //= 2
        values = values[..., :width] + values[..., width:]
    return values
