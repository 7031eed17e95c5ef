"""Hadamard rotation of rows, with every float32 operation in a fixed order.

The rotation spreads an outlier channel over its block, so that one scale per row suffices. The rotation is
its own inverse.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rotation_block(head_dim: int) -> int:
    """Return the block size of the rotation: the largest power of two that divides ``head_dim``."""
    if head_dim < 1:
        raise ValueError(f"a row has at least one value, got head_dim {head_dim}")
    return head_dim & -head_dim


def hadamard(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rotate float32 rows [..., D] in blocks of b = ``rotation_block(D)`` values.

    A block is multiplied by the Sylvester-Hadamard matrix divided by sqrt(b). For h = 1, 2, 4, ..., b/2, each
    pair (i, i + h) with ``i & h == 0`` becomes (x[i] + x[i + h], x[i] - x[i + h]) in float32. At the end,
    every value is multiplied by ``float32(1 / sqrt(b))``.
    """
    head_dim = rows.shape[-1]
    block = rotation_block(head_dim)
    out, h = rows, 1
    while h < block:
        pairs = out.reshape(*rows.shape[:-1], head_dim // (2 * h), 2, h)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack([low + high, low - high], axis=-2)
        h *= 2
    return out.reshape(rows.shape) * np.float32(1 / np.sqrt(block))
