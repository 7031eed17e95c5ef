"""mxfp4 and nvfp4: E2M1 codes with one scale byte for each 32 or 16 values.

Codes and scales equal those of ``mlx.core.quantize``, except for negative zeros, tiny mxfp4 scales and groups
of zeros: see docs/spec/page-formats.md.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from .base import Array, Bools, Floats, PageFormat, register, zero_nonfinite
from .e2m1 import nearest_index, signed_codes, values_of
from .packing import pack, unpack

Bytes = NDArray[np.uint8]


class _Microscaled(PageFormat):
    """Base of formats with one scale per ``multiple`` values. Rows are not rotated."""

    scale_dtype = np.uint8
    code_bits = 4

    @abstractmethod
    def scale_bytes(self, absmax: Floats) -> Bytes: ...

    @abstractmethod
    def scale_values(self, scales: Bytes) -> Floats: ...

    def scales_per_row(self, head_dim: int) -> int:
        return head_dim // self.multiple

    def encode(self, rows: Floats) -> tuple[Array, Array, Bools]:
        rows, storable = zero_nonfinite(rows)
        groups = rows.reshape(*rows.shape[:-1], self.scales_per_row(rows.shape[-1]), self.multiple)
        magnitudes = np.abs(groups)
        scales = self.scale_bytes(magnitudes.max(-1))
        used = self.scale_values(scales)[..., None]
        with np.errstate(under="ignore", over="ignore"):
            codes = signed_codes(groups, nearest_index(magnitudes, used), used)
        scales[~storable] = 0
        return pack(codes.reshape(rows.shape), 4), scales, storable

    def dequantize(self, codes: Array, scales: Array) -> Floats:
        head_dim = self._check_stored(codes, scales)
        values = values_of(unpack(codes, 4)).reshape(*scales.shape, self.multiple)
        with np.errstate(under="ignore", over="ignore"):
            values = values * self.scale_values(scales)[..., None]
        return values.reshape(*codes.shape[:-1], head_dim)


@register
class MXFP4(_Microscaled):
    """mxfp4: E8M0 scales (OCP Microscaling v1.0). Byte b is 2^(b - 127).

    A group with largest magnitude a has the smallest b with a <= 6 * 2^(b - 127), but at most 252.
    """

    name = "mxfp4"
    multiple = 32

    def scale_bytes(self, absmax: Floats) -> Bytes:
        bits = np.ascontiguousarray(absmax).view(np.uint32)
        exponents = (bits + np.uint32(0x3FFFFF) >> np.uint32(23)).astype(np.int32) - 2
        return np.clip(exponents, 0, 252).astype(np.uint8)

    def scale_values(self, scales: Bytes) -> Floats:
        values = np.where(scales == 0, np.uint32(1 << 22), scales.astype(np.uint32) << np.uint32(23))
        return np.where(scales == 255, np.float32(np.nan), values.view(np.float32))


@register
class NVFP4(_Microscaled):
    """nvfp4: E4M3 scales, the nearest to (largest magnitude) / 6, ties to even, at most 448."""

    name = "nvfp4"
    multiple = 16

    def scale_bytes(self, absmax: Floats) -> Bytes:
        quotient = np.ascontiguousarray(absmax / np.float32(6))
        bits = quotient.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFFF) + (bits >> np.uint32(20) & np.uint32(1))) >> np.uint32(20)
        normal = rounded.astype(np.int32) - (120 << 3)
        with np.errstate(under="ignore"):
            subnormal = np.rint(np.minimum(quotient, np.float32(1)) * np.float32(512)).astype(np.int32)
        return np.minimum(np.where(quotient < np.float32(2**-6), subnormal, normal), 126).astype(np.uint8)

    def scale_values(self, scales: Bytes) -> Floats:
        normal = (scales.astype(np.uint32) + np.uint32(120 << 3)) << np.uint32(20)
        values = np.where(scales < 8, scales * np.float32(2**-9), normal.view(np.float32))
        return np.where(scales & 127 == 127, np.float32(np.nan), values)
