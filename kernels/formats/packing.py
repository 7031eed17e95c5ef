from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import Array, Floats


def pack(codes: Array, bits: int) -> NDArray[np.uint32]:
    """Pack codes [..., D] of ``bits`` bits into uint32 [..., D * bits / 32], element 0 lowest."""
    per_word = 32 // bits
    words = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_word, per_word).astype(np.uint32)
    packed: NDArray[np.uint32] = np.bitwise_or.reduce(words << np.arange(0, 32, bits, dtype=np.uint32), -1)
    return packed


def unpack(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    codes = words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & np.uint32((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], words.shape[-1] * (32 // bits)).astype(np.uint8)


def tree_sum(values: Floats) -> Floats:
    """Return the sum over the last axis, [..., D] -> [..., 1], in a fixed order.

    The row is zero-padded to a power of two. Its upper half is added to its lower half until one value is
    left.
    """
    width = 1 << (values.shape[-1] - 1).bit_length()
    if width != values.shape[-1]:
        padding = [(0, 0)] * (values.ndim - 1) + [(0, width - values.shape[-1])]
        values = np.pad(values, padding)
    while width > 1:
        width //= 2
        values = values[..., :width] + values[..., width:]
    return values
