"""Codecs: page formats computed on MLX arrays, bit-equal to their definitions."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..formats import PageFormat, page_format, rotation_block
from ..formats.affine import AFFINE4, AFFINE8, GROUP_SIZE, SMALLEST_STEP
from ..formats.base import MAX_FP16
from ..formats.fp5 import COARSE, EDGES, MAGNITUDES, MAX_SCALE, SCALE_FACTOR, STEPS
from ..formats.integer import INT4, INT8
from ..formats.microscaling import MXFP4, NVFP4
from .e2m1 import FP4Codec, MicroscalingCodec, nearest_index, signed_codes
from .packing import Codec, Encoded, pack, tree_sum, unpack


class FP5Codec:
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
        absmax = magnitudes.max(axis=-1, keepdims=True)
        half = mx.minimum(absmax * float(SCALE_FACTOR), float(MAX_SCALE)).astype(mx.float16)
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


class HalfCodec:
    """Codec of bf16 and fp16: MLX's own 16-bit arrays."""

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


class IntegerCodec:
    def __init__(self, fmt: INT8 | INT4) -> None:
        self.format: PageFormat = fmt
        self._integers = fmt

    def layout(self, head_dim: int) -> tuple[tuple[int, mx.Dtype], ...]:
        return ((self.format.codes_per_row(head_dim), mx.uint32), (1, mx.float16))

    def encode(self, rows: mx.array) -> Encoded:
        fmt = self._integers
        storable = mx.isfinite(rows).all(axis=-1)
        rows = mx.where(storable[..., None], rows, mx.zeros_like(rows))
        absmax = mx.abs(rows).max(axis=-1, keepdims=True)
        scales = mx.minimum(absmax * float(fmt.scale_factor), float(MAX_FP16)).astype(mx.float16)
        codes = mx.clip(mx.round(rows / scales.astype(mx.float32)), fmt.lowest, fmt.highest)
        codes = mx.where(scales == 0, mx.zeros_like(codes), codes).astype(mx.int32)
        return Encoded((pack(codes.view(mx.uint32) & ((1 << fmt.bits) - 1), fmt.bits), scales), storable)

    def decode(self, parts: tuple[mx.array, ...]) -> mx.array:
        codes, scales = parts
        sign = 1 << (self._integers.bits - 1)
        signed = (unpack(codes, self._integers.bits) ^ sign).astype(mx.int32) - sign
        return signed.astype(mx.float32) * scales.astype(mx.float32)


class AffineCodec:
    def __init__(self, fmt: AFFINE8 | AFFINE4) -> None:
        self.format: PageFormat = fmt
        self._bits = fmt.bits

    def layout(self, head_dim: int) -> tuple[tuple[int, mx.Dtype], ...]:
        fmt = self.format
        return ((fmt.codes_per_row(head_dim), mx.uint32), (fmt.scales_per_row(head_dim), mx.float16))

    def encode(self, rows: mx.array) -> Encoded:
        finite = mx.isfinite(rows).all(axis=-1)
        rows = mx.where(finite[..., None], rows, mx.zeros_like(rows))
        groups = rows.reshape(*rows.shape[:-1], rows.shape[-1] // GROUP_SIZE, GROUP_SIZE)
        step, bias = self._step_and_bias(groups)
        codes = mx.clip(mx.round((groups - bias) / step), 0, (1 << self._bits) - 1)
        scales = mx.concatenate([step, bias], axis=-1).astype(mx.float16).reshape(*rows.shape[:-1], -1)
        storable = mx.logical_and(finite, mx.isfinite(scales).all(axis=-1))
        scales = mx.where(storable[..., None], scales, mx.zeros_like(scales))
        codes = mx.where(storable[..., None], codes.reshape(rows.shape), mx.zeros_like(rows))
        return Encoded((pack(codes.astype(mx.uint32), self._bits), scales), storable)

    def decode(self, parts: tuple[mx.array, ...]) -> mx.array:
        codes = unpack(parts[0], self._bits)
        pairs = parts[1].astype(mx.float32).reshape(*parts[1].shape[:-1], -1, 2)
        grouped = codes.reshape(*pairs.shape[:-1], GROUP_SIZE).astype(mx.float32)
        return (grouped * pairs[..., :1] + pairs[..., 1:]).reshape(codes.shape)

    def _step_and_bias(self, groups: mx.array) -> tuple[mx.array, mx.array]:
        low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
        step = mx.maximum((high - low) / ((1 << self._bits) - 1), float(SMALLEST_STEP))
        from_low = mx.abs(low) > mx.abs(high)
        step, edge = mx.where(from_low, step, -step), mx.where(from_low, low, high)
        count = mx.round(edge / step)
        used = count != 0
        return mx.where(used, edge / count, step), mx.where(used, edge, mx.zeros_like(edge))


class NumpyCodec:
    """Codec that runs a format's NumPy definition on evaluated arrays."""

    def __init__(self, fmt: PageFormat) -> None:
        self.format = fmt

    def layout(self, head_dim: int) -> tuple[tuple[int, mx.Dtype], ...]:
        fmt = self.format
        parts = (
            (fmt.codes_per_row(head_dim), fmt.code_dtype),
            (fmt.scales_per_row(head_dim), fmt.scale_dtype),
        )
        return tuple((width, mx.array(np.zeros(1, dtype)).dtype) for width, dtype in parts if width)

    def encode(self, rows: mx.array) -> Encoded:
        *parts, storable = map(mx.array, self.format.encode(np.array(rows)))
        return Encoded(tuple(part for part in parts if part.shape[-1]), storable)

    def decode(self, parts: tuple[mx.array, ...]) -> mx.array:
        codes, *rest = map(np.array, parts)
        scales = rest[0] if rest else np.zeros((*codes.shape[:-1], 0), self.format.scale_dtype)
        return mx.array(self.format.dequantize(codes, scales))


def codec(name: str) -> Codec:
    fmt = page_format(name)
    if isinstance(fmt, INT8 | INT4):
        return IntegerCodec(fmt)
    if isinstance(fmt, MXFP4 | NVFP4):
        return MicroscalingCodec(fmt)
    if isinstance(fmt, AFFINE8 | AFFINE4):
        return AffineCodec(fmt)
    if fmt.name == "fp4":
        return FP4Codec()
    if fmt.name == "fp5":
        return FP5Codec()
    if fmt.name in ("bf16", "fp16"):
        return HalfCodec(fmt.name, mx.bfloat16 if fmt.name == "bf16" else mx.float16)
    return NumpyCodec(fmt)
