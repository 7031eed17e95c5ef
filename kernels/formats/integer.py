"""int8 and int4: symmetric integers with one fp16 scale per rotated row.

Codes and scales are bit-equal on every backend: docs/spec/page-formats.md defines each operation.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .base import MAX_FP16, Array, Bools, Floats, PageFormat, register, zero_nonfinite
from .packing import pack, unpack


class _Integer(PageFormat):
    """Two's-complement codes of ``code_bits`` bits, packed into uint32, element 0 in the lowest bits.

    The scale of a row is ``fp16(max|x| * scale_factor)``, at most 65504.
    """

    rotates = True
    lowest: ClassVar[int]
    highest: ClassVar[int]
    scale_factor: ClassVar[np.float32]

    def encode(self, rows: Floats) -> tuple[Array, Array, Bools]:
        rows, storable = zero_nonfinite(rows)
        with np.errstate(under="ignore", over="ignore", divide="ignore", invalid="ignore"):
            absmax = np.abs(rows).max(-1, keepdims=True)
            scales = np.minimum(absmax * self.scale_factor, MAX_FP16).astype(np.float16)
            codes = np.clip(np.rint(rows / scales.astype(np.float32)), self.lowest, self.highest)
        codes = np.where(scales == 0, 0, codes).astype(np.int8).view(np.uint8)
        return pack(codes & np.uint8((1 << self.code_bits) - 1), self.code_bits), scales, storable

    def dequantize(self, codes: Array, scales: Array) -> Floats:
        self._check_stored(codes, scales)
        unused = np.uint8(8 - self.code_bits)
        signed = (unpack(codes, self.code_bits) << unused).view(np.int8) >> unused.view(np.int8)
        values: Floats = signed.astype(np.float32) * scales.astype(np.float32)
        return values


@register
class INT8(_Integer):
    """int8: -127 to 127, so that negation is exact."""

    name = "int8"
    code_bits, multiple = 8, 4
    lowest, highest = -127, 127
    scale_factor = np.float32(1 / 127)


@register
class INT4(_Integer):
    """int4: -8 to 7."""

    name = "int4"
    code_bits = 4
    lowest, highest = -8, 7
    scale_factor = np.float32(1 / 7)
