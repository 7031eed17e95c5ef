"""The page formats' twins on MLX arrays: the same float32 operations in the same order.

``octavo.kernels.formats`` is the definition; tests hold codes and scales bit-equal to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from octavo.kernels.formats import PageFormat, page_format
from octavo.kernels.formats.fp4 import EDGES, MAGNITUDES, MAX_SCALE, SCALE_FACTORS


@dataclass(frozen=True, slots=True)
class Encoded:
    """Stored form of rows [..., D]: ``parts`` are [..., width] arrays, ``storable`` is [...]."""

    parts: tuple[mx.array, ...]
    storable: mx.array


class Codec(Protocol):
    """One format on MLX arrays. ``layout(D)`` gives (width, dtype) of each stored part."""

    format: PageFormat

    def layout(self, head_dim: int) -> tuple[tuple[int, mx.Dtype], ...]: ...

    def encode(self, rows: mx.array) -> Encoded:
        """Store float32 rows, already rotated; rows that are not storable become zeros."""
        ...

    def decode(self, parts: tuple[mx.array, ...]) -> mx.array:
        """Parts to float32 rows, still rotated."""
        ...


def hadamard(rows: mx.array) -> mx.array:
    """``octavo.kernels.formats.hadamard``, operation for operation."""
    head_dim = rows.shape[-1]
    out, h = rows, 1
    while h < head_dim:
        pairs = out.reshape(*rows.shape[:-1], head_dim // (2 * h), 2, h)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        out = mx.stack([low + high, low - high], axis=-2)
        h *= 2
    return out.reshape(rows.shape) * mx.array(1 / head_dim**0.5, mx.float32)


class HalfCodec:
    """bf16 and fp16: MLX's own 16-bit arrays."""

    def __init__(self, name: str, dtype: mx.Dtype) -> None:
        self.format = page_format(name)
        self._dtype = dtype

    def layout(self, head_dim: int) -> tuple[tuple[int, mx.Dtype], ...]:
        return ((self.format.codes_per_row(head_dim), self._dtype),)

    def encode(self, rows: mx.array) -> Encoded:
        half = rows.astype(self._dtype)
        storable = mx.isfinite(half.astype(mx.float32)).all(axis=-1)
        return Encoded((mx.where(storable[..., None], half, mx.zeros_like(half)),), storable)

    def decode(self, parts: tuple[mx.array, ...]) -> mx.array:
        return parts[0].astype(mx.float32)


class FP4Codec:
    """fp4 as ``octavo.kernels.formats.fp4`` defines it."""

    def __init__(self) -> None:
        self.format = page_format("fp4")
        self._magnitudes = mx.array(MAGNITUDES)
        self._factors = mx.array(SCALE_FACTORS)

    def layout(self, head_dim: int) -> tuple[tuple[int, mx.Dtype], ...]:
        return ((self.format.codes_per_row(head_dim), mx.uint32), (1, mx.float16))

    def encode(self, rows: mx.array) -> Encoded:
        storable = mx.isfinite(rows).all(axis=-1)
        rows = mx.where(storable[..., None], rows, mx.zeros_like(rows))
        scale, index = self._best_scale(mx.abs(rows))
        nibbles = index | (rows.view(mx.uint32) >> 31) << 3
        nibbles = mx.where(scale == 0, mx.zeros_like(nibbles), nibbles)
        eights = nibbles.reshape(*nibbles.shape[:-1], -1, 8) << mx.arange(0, 32, 4, dtype=mx.uint32)
        return Encoded((eights.sum(axis=-1), scale), storable)

    def decode(self, parts: tuple[mx.array, ...]) -> mx.array:
        codes, scales = parts
        nibbles = codes[..., None] >> mx.arange(0, 32, 4, dtype=mx.uint32) & 15
        nibbles = nibbles.reshape(*codes.shape[:-1], -1)
        values = self._magnitudes[nibbles & 7] * scales.astype(mx.float32)
        return mx.where(nibbles >= 8, -values, values)

    def _best_scale(self, magnitudes: mx.array) -> tuple[mx.array, mx.array]:
        """fp16 scales [..., 1] and magnitude indices [..., D] of the best candidates, all of
        which are tried at once: [..., candidates, D]."""
        absmax = magnitudes.max(axis=-1, keepdims=True)
        halves = mx.minimum(absmax * self._factors, float(MAX_SCALE)).astype(mx.float16)[..., None]
        scales, magnitudes = halves.astype(mx.float32), magnitudes[..., None, :]
        indices = mx.zeros((*scales.shape[:-1], magnitudes.shape[-1]), mx.uint32)
        for edge, tie_moves in EDGES:
            limits = scales * edge
            indices += magnitudes >= limits if tie_moves else magnitudes > limits
        differences = magnitudes - scales * self._magnitudes[indices]
        errors = _halving_sum(differences * differences)
        # A candidate that is 0 stores a zero row: its error is never below a usable one's.
        best = errors.argmin(axis=-2, keepdims=True)
        return (
            mx.take_along_axis(halves, best, axis=-2).squeeze(-2),
            mx.take_along_axis(indices, best, axis=-2).squeeze(-2),
        )


def _halving_sum(values: mx.array) -> mx.array:
    """Sum over the last axis [..., D] -> [..., 1], upper half added onto lower half."""
    width = 1 << (values.shape[-1] - 1).bit_length()
    if width != values.shape[-1]:
        values = mx.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, width - values.shape[-1])])
    while width > 1:
        width //= 2
        values = values[..., :width] + values[..., width:]
    return values


def codec(name: str) -> Codec:
    """The twin of ``page_format(name)``; ValueError if the format has none here."""
    fmt = page_format(name)
    if fmt.name == "bf16":
        return HalfCodec("bf16", mx.bfloat16)
    if fmt.name == "fp16":
        return HalfCodec("fp16", mx.float16)
    if fmt.name == "fp4":
        return FP4Codec()
    raise ValueError(f"the reference backend cannot store {name} pages; use bf16, fp16 or fp4")
