"""The sum of a row in the one order that every backend can follow."""

from __future__ import annotations

import numpy as np

from .base import Floats


def tree_sum(values: Floats) -> Floats:
    """Sum over the last axis [..., D] -> [..., 1]: zero-padded to P, a power of two, then the upper half
    is added onto the lower half, P/2, P/4, ..., 1, one rounding per addition."""
    width = 1 << (values.shape[-1] - 1).bit_length()
    if width != values.shape[-1]:
        padding = [(0, 0)] * (values.ndim - 1) + [(0, width - values.shape[-1])]
        values = np.pad(values, padding)
    while width > 1:
        width //= 2
        values = values[..., :width] + values[..., width:]
    return values
