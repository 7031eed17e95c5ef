"""The orthonormal Hadamard rotation of a row, with every float32 operation in a fixed order.

The rotation spreads an outlier channel over its block of the row, so that one scale per row suffices. If K
and Q are rotated alike, their products do not change. A weighted sum of rotated V rows is rotated back once:
``hadamard`` is its own inverse.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rotation_block(head_dim: int) -> int:
    """Return the number of values that a rotation mixes: the largest power of two dividing ``head_dim``.

    A row of 64 or 128 values is one block; 96 is three blocks of 32, 192 three of 64, 80 five of 16, and 112
    seven of 16. If an outlier is spread over one of n blocks, the row's absmax is at most sqrt(n) times its
    RMS. For n up to 7, Gaussian rows have a larger ratio anyway, so smaller blocks lose nothing."""
    if head_dim < 1:
        raise ValueError(f"a row has at least one value, got head_dim {head_dim}")
    return head_dim & -head_dim


def hadamard(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rotate float32 rows [..., D] in blocks of b = ``rotation_block(D)`` values.

    Each block is multiplied by the Sylvester-Hadamard matrix of its size, divided by sqrt(b). The order of
    operations is fixed: for h = 1, 2, 4, ..., b/2, each pair (i, i + h) with ``i & h == 0`` becomes
    (x[i] + x[i + h], x[i] - x[i + h]), rounded to float32 each time. At the end, every value is multiplied by
    ``float32(1 / sqrt(b))``."""
    head_dim = rows.shape[-1]
    block = rotation_block(head_dim)
    out, h = rows, 1
    while h < block:
        pairs = out.reshape(*rows.shape[:-1], head_dim // (2 * h), 2, h)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack([low + high, low - high], axis=-2)
        h *= 2
    return out.reshape(rows.shape) * np.float32(1 / np.sqrt(block))
