from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ..formats import PageFormat


@dataclass(frozen=True, slots=True)
class Encoded:
    """Stored form of rows [..., D]: ``parts`` are codes and scales, [..., width]; ``storable`` is [...]."""

    parts: tuple[mx.array, ...]
    storable: mx.array


class Codec(Protocol):
    """A page format on MLX arrays. ``layout(D)`` returns (width, dtype) of codes and of scales, if any."""

    format: PageFormat

    def layout(self, head_dim: int) -> tuple[tuple[int, mx.Dtype], ...]: ...

    def encode(self, rows: mx.array) -> Encoded:
        """Encode float32 rows, already rotated if the format rotates; rows not storable become zeros."""
        ...

    def decode(self, parts: tuple[mx.array, ...]) -> mx.array:
        """Return the float32 rows of codes and scales, not rotated back."""
        ...


def pack(codes: mx.array, bits: int) -> mx.array:
    """Pack uint32 codes [..., D] into words [..., D * bits / 32], element 0 lowest."""
    words = codes.reshape(*codes.shape[:-1], -1, 32 // bits) << mx.arange(0, 32, bits, dtype=mx.uint32)
    return words.sum(axis=-1)


def unpack(words: mx.array, bits: int) -> mx.array:
    codes = words[..., None] >> mx.arange(0, 32, bits, dtype=mx.uint32) & ((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], -1)


def tree_sum(values: mx.array) -> mx.array:
    """Return the sum over the last axis, [..., D] -> [..., 1], in the order of ``formats.packing``."""
    width = 1 << (values.shape[-1] - 1).bit_length()
    if width != values.shape[-1]:
        values = mx.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, width - values.shape[-1])])
    while width > 1:
        width //= 2
        values = values[..., :width] + values[..., width:]
    return values
