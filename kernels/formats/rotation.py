"""The orthonormal Hadamard rotation of a row, with every float32 operation in a fixed order.

It spreads an outlier channel over the whole row, so that one scale per row suffices. K and
Q rotated alike have the same products, and a weighted sum of rotated V rows needs one
rotation back: ``hadamard`` is its own inverse.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def hadamard(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows [..., D] float32, D a power of two, times the Sylvester-Hadamard matrix / sqrt(D).

    Bit-defined: for h = 1, 2, 4, ..., D/2 each pair (i, i + h) with ``i & h == 0`` becomes
    (x[i] + x[i + h], x[i] - x[i + h]), rounded to float32 each time; at the end every value
    is multiplied once by ``float32(1 / sqrt(D))``.
    """
    head_dim = rows.shape[-1]
    if not is_power_of_two(head_dim):
        raise ValueError(f"the rotation needs a power of two, got head_dim {head_dim}; leave such rows as is")
    out, h = rows, 1
    while h < head_dim:
        pairs = out.reshape(*rows.shape[:-1], head_dim // (2 * h), 2, h)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack([low + high, low - high], axis=-2)
        h *= 2
    return out.reshape(rows.shape) * np.float32(1 / np.sqrt(head_dim))
