"""affine8 and affine4: MLX's affine quantization in groups of 64 values.

For fp16 rows, codes, scales and biases equal those of ``mlx.core.quantize(rows, group_size=64)``. See
docs/spec/page-formats.md.
"""

from __future__ import annotations

import numpy as np

from .base import Array, Bools, Floats, PageFormat, register, zero_nonfinite
from .packing import pack, unpack

GROUP_SIZE = 64
SMALLEST_STEP = np.float32(1e-7)


class _Affine(PageFormat):
    multiple = GROUP_SIZE

    def scales_per_row(self, head_dim: int) -> int:
        return head_dim // GROUP_SIZE * 2

    def encode(self, rows: Floats) -> tuple[Array, Array, Bools]:
        rows, finite = zero_nonfinite(rows)
        groups = rows.reshape(*rows.shape[:-1], rows.shape[-1] // GROUP_SIZE, GROUP_SIZE)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            step, bias = self._step_and_bias(groups)
            codes = np.clip(np.rint((groups - bias) / step), 0, (1 << self.code_bits) - 1)
            scales = np.concatenate([step, bias], -1).astype(np.float16)
        scales = scales.reshape(*rows.shape[:-1], self.scales_per_row(rows.shape[-1]))
        storable: Bools = np.asarray(finite & np.isfinite(scales).all(-1))
        scales[~storable] = 0
        codes = np.where(storable[..., None, None], codes, 0)
        return pack(codes.reshape(rows.shape), self.code_bits), scales, storable

    def dequantize(self, codes: Array, scales: Array) -> Floats:
        head_dim = self._check_stored(codes, scales)
        pairs = scales.astype(np.float32).reshape(*codes.shape[:-1], head_dim // GROUP_SIZE, 2)
        values = unpack(codes, self.code_bits).reshape(*pairs.shape[:-1], GROUP_SIZE).astype(np.float32)
        rows: Floats = values * pairs[..., :1] + pairs[..., 1:]
        return rows.reshape(*codes.shape[:-1], head_dim)

    def _step_and_bias(self, groups: Floats) -> tuple[Floats, Floats]:
        low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
        step = np.maximum((high - low) / np.float32((1 << self.code_bits) - 1), SMALLEST_STEP)
        from_low = np.abs(low) > np.abs(high)
        step, edge = np.where(from_low, step, -step), np.where(from_low, low, high)
        count = np.rint(edge / step)
        used = count != 0
        bias = np.where(used, edge, np.float32(0))
        return np.where(used, edge / np.where(used, count, np.float32(1)), step), bias


@register
class AFFINE8(_Affine):
    name = "affine8"
    code_bits = 8


@register
class AFFINE4(_Affine):
    name = "affine4"
    code_bits = 4
