"""fp5 on MLX arrays, with the operations of its definition in order."""

from __future__ import annotations

import mlx.core as mx

from ..formats import page_format
from ..formats.fp5 import (
    COARSE,
    EDGES,
    LARGEST_SCALE,
    MAGNITUDES,
    SCALE_FACTOR,
    STEPS,
)
from .e2m1 import nearest_index, signed_codes
from .packing import Encoded, pack, tree_sum, unpack


class FP5Codec:
    """Codec of fp5, as defined in ``octavo.kernels.formats.fp5``."""

    def __init__(self) -> None:
        self.format = page_format("fp5")
        self._magnitudes = mx.array(MAGNITUDES)
        self._steps = mx.array(STEPS, mx.uint16)

    def layout(self, head_dim: int) -> tuple[tuple[int, mx.Dtype], ...]:
        fmt = self.format
        return ((fmt.codes_per_row(head_dim), mx.uint32), (fmt.scales_per_row(head_dim), mx.uint8))

    def encode(self, rows: mx.array) -> Encoded:
        storable = mx.isfinite(rows).all(axis=-1)
        rows = mx.where(storable[..., None], rows, mx.zeros_like(rows))
        scales, indices = self._best_scale(mx.abs(rows))
        codes = signed_codes(rows, indices >> 1, scales)
        low_bits = mx.where(scales == 0, mx.zeros_like(indices), indices & 1)
        planes = pack_bits(low_bits)
        planes = mx.concatenate([scales.astype(mx.uint8), planes[..., 1:]], axis=-1)
        return Encoded((pack(codes, 4), planes), storable)

    def decode(self, parts: tuple[mx.array, ...]) -> mx.array:
        codes, planes = parts
        nibbles = unpack(codes, 4)
        low_bits = mx.concatenate([mx.zeros_like(planes[..., :1]), planes[..., 1:]], axis=-1)[..., None]
        low_bits = (low_bits >> mx.arange(8, dtype=mx.uint8) & 1).reshape(nibbles.shape)
        values = self._magnitudes[(nibbles & 7) << 1 | low_bits]
        return mx.where(nibbles >= 8, -values, values) * _scale_values(planes[..., :1])

    def _best_scale(self, magnitudes: mx.array) -> tuple[mx.array, mx.array]:
        """Return scale bytes [..., 1] and E2M2 indices [..., D] of the best candidates. All candidates are
        computed at once: [..., candidates, D]."""
        absmax = magnitudes.max(axis=-1, keepdims=True)
        half = mx.minimum(absmax * float(SCALE_FACTOR), float(LARGEST_SCALE)).astype(mx.float16)
        base = mx.maximum(half.view(mx.uint16) >> 7, 1)
        scales = mx.minimum(base + self._steps, 247)[..., None]
        values, magnitudes = _scale_values(scales), magnitudes[..., None, :]
        fine = nearest_index(magnitudes[..., COARSE:], values, EDGES)
        indices = mx.concatenate([nearest_index(magnitudes[..., :COARSE], values) << 1, fine], axis=-1)
        differences = magnitudes - values * self._magnitudes[indices]
        best = tree_sum(differences * differences).argmin(axis=-2, keepdims=True)
        scale = mx.take_along_axis(scales, best, axis=-2).squeeze(-2)
        return (
            mx.where(half == 0, mx.zeros_like(scale), scale),
            mx.take_along_axis(indices, best, axis=-2).squeeze(-2),
        )


def pack_bits(bits: mx.array) -> mx.array:
    """Pack bits [..., D] into bytes [..., D / 8], element 0 lowest."""
    octets = bits.reshape(*bits.shape[:-1], -1, 8) << mx.arange(8, dtype=mx.uint32)
    return octets.sum(axis=-1).astype(mx.uint8)


def _scale_values(scales: mx.array) -> mx.array:
    return (scales.astype(mx.uint16) << 7).view(mx.float16).astype(mx.float32)
