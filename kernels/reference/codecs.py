"""Page formats on MLX arrays.

MLX converts rows to 16-bit types. NumPy computes all other formats by their definition, on evaluated arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..formats import page_format, rotation_block

_HALF = {"bf16": mx.bfloat16, "fp16": mx.float16}


class Encoded(NamedTuple):
    """Stored form of rows [..., D]: ``parts`` are codes and scales, [..., width]; ``storable`` is [...]."""

    parts: tuple[mx.array, ...]
    storable: mx.array


class Codec:
    def __init__(self, name: str) -> None:
        self.format = page_format(name)
        self._half = _HALF.get(name)

    def layout(self, head_dim: int) -> tuple[tuple[int, mx.Dtype], ...]:
        """Return (width, dtype) of codes and of scales, if any."""
        fmt = self.format
        codes, scales = fmt.codes_per_row(head_dim), fmt.scales_per_row(head_dim)
        if self._half is not None:
            return ((codes, self._half),)
        parts = (codes, fmt.code_dtype), (scales, fmt.scale_dtype)
        return tuple((width, getattr(mx, dtype.__name__)) for width, dtype in parts if width)

    def encode(self, rows: mx.array) -> Encoded:
        """Encode float32 rows, already rotated if the format rotates; rows not storable become zeros."""
        if self._half is None:
            *parts, storable = map(mx.array, self.format.encode(np.array(rows)))
            return Encoded(tuple(part for part in parts if part.shape[-1]), storable)
        half = rows.astype(self._half)
        storable = mx.isfinite(half.astype(mx.float32)).all(axis=-1)
        return Encoded((mx.where(storable[..., None], half, mx.zeros_like(half)),), storable)

    def decode(self, parts: tuple[mx.array, ...]) -> mx.array:
        """Return the float32 rows of codes and scales, not rotated back."""
        if self._half is not None:
            return parts[0].astype(mx.float32)
        codes, *rest = map(np.array, parts)
        scales = rest[0] if rest else np.zeros((*codes.shape[:-1], 0), self.format.scale_dtype)
        return mx.array(self.format.dequantize(codes, scales))


def hadamard(rows: mx.array) -> mx.array:
    head_dim = rows.shape[-1]
    block = rotation_block(head_dim)
    out, h = rows, 1
    while h < block:
        pairs = out.reshape(*rows.shape[:-1], head_dim // (2 * h), 2, h)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        out = mx.stack([low + high, low - high], axis=-2)
        h *= 2
    return out.reshape(rows.shape) * mx.array(1 / block**0.5, mx.float32)
