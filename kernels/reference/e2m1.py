from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..formats import PageFormat, page_format
from ..formats.base import MAX_FP16
from ..formats.e2m1 import EDGES, MAGNITUDES
from ..formats.fp4 import SCALE_FACTORS
from ..formats.microscaling import MXFP4, NVFP4
from .packing import Encoded, pack, tree_sum, unpack


class FP4Codec:
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
        return Encoded((pack(signed_codes(rows, index, scale), 4), scale), storable)

    def decode(self, parts: tuple[mx.array, ...]) -> mx.array:
        codes, scales = parts
        return _e2m1_values(unpack(codes, 4), self._magnitudes) * scales.astype(mx.float32)

    def _best_scale(self, magnitudes: mx.array) -> tuple[mx.array, mx.array]:
        absmax = magnitudes.max(axis=-1, keepdims=True)
        halves = mx.minimum(absmax * self._factors, float(MAX_FP16)).astype(mx.float16)[..., None]
        scales, magnitudes = halves.astype(mx.float32), magnitudes[..., None, :]
        indices = nearest_index(magnitudes, scales)
        differences = magnitudes - scales * self._magnitudes[indices]
        errors = tree_sum(differences * differences)
        best = errors.argmin(axis=-2, keepdims=True)
        return (
            mx.take_along_axis(halves, best, axis=-2).squeeze(-2),
            mx.take_along_axis(indices, best, axis=-2).squeeze(-2),
        )


class MicroscalingCodec:
    def __init__(self, fmt: MXFP4 | NVFP4) -> None:
        self.format: PageFormat = fmt
        self._group_size = fmt.group_size
        self._scale_bytes = _e8m0_bytes if fmt.name == "mxfp4" else _e4m3_bytes
        self._scale_values = mx.array(fmt.scale_values(np.arange(256, dtype=np.uint8)))
        self._magnitudes = mx.array(MAGNITUDES)

    def layout(self, head_dim: int) -> tuple[tuple[int, mx.Dtype], ...]:
        fmt = self.format
        return ((fmt.codes_per_row(head_dim), mx.uint32), (fmt.scales_per_row(head_dim), mx.uint8))

    def encode(self, rows: mx.array) -> Encoded:
        storable = mx.isfinite(rows).all(axis=-1)
        rows = mx.where(storable[..., None], rows, mx.zeros_like(rows))
        groups = rows.reshape(*rows.shape[:-1], rows.shape[-1] // self._group_size, self._group_size)
        magnitudes = mx.abs(groups)
        scales = self._scale_bytes(magnitudes.max(axis=-1))
        used = self._scale_values[scales][..., None]
        codes = signed_codes(groups, nearest_index(magnitudes, used), used)
        scales = mx.where(storable[..., None], scales, mx.zeros_like(scales))
        return Encoded((pack(codes.reshape(rows.shape), 4), scales), storable)

    def decode(self, parts: tuple[mx.array, ...]) -> mx.array:
        codes, scales = parts
        values = _e2m1_values(unpack(codes, 4), self._magnitudes)
        grouped = values.reshape(*scales.shape, self._group_size) * self._scale_values[scales][..., None]
        return grouped.reshape(values.shape)


def nearest_index(
    magnitudes: mx.array, scales: mx.array, edges: Sequence[tuple[float, bool]] = EDGES
) -> mx.array:
    indices = mx.zeros(mx.broadcast_shapes(magnitudes.shape, scales.shape), mx.uint32)
    for edge, tie_moves in edges:
        limits = scales * edge
        indices += magnitudes >= limits if tie_moves else magnitudes > limits
    return indices


def signed_codes(rows: mx.array, index: mx.array, scale: mx.array) -> mx.array:
    codes = index | (rows.view(mx.uint32) >> 31) << 3
    return mx.where(scale == 0, mx.zeros_like(codes), codes)


def _e2m1_values(codes: mx.array, magnitudes: mx.array) -> mx.array:
    values = magnitudes[codes & 7]
    return mx.where(codes >= 8, -values, values)


def _e8m0_bytes(absmax: mx.array) -> mx.array:
    exponents = (absmax.view(mx.uint32) + 0x3FFFFF >> 23).astype(mx.int32) - 2
    return mx.clip(exponents, 0, 252).astype(mx.uint8)


def _e4m3_bytes(absmax: mx.array) -> mx.array:
    quotient = absmax / 6
    bits = quotient.view(mx.uint32)
    normal = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20).astype(mx.int32) - (120 << 3)
    subnormal = mx.round(mx.minimum(quotient, 1) * 512).astype(mx.int32)
    return mx.minimum(mx.where(quotient < 2**-6, subnormal, normal), 126).astype(mx.uint8)
