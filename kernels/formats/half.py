"""16-bit formats: values rounded to nearest even, without scales."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from .base import Array, Bools, Floats, PageFormat, register


class _Half(PageFormat):
    code_dtype = np.uint16
    code_bits, multiple = 16, 1

    def scales_per_row(self, head_dim: int) -> int:  # noqa: ARG002
        return 0

    def encode(self, rows: Floats) -> tuple[Array, Array, Bools]:
        codes = self._round(rows)
        scales = np.zeros((*rows.shape[:-1], 0), self.scale_dtype)
        storable: Bools = np.asarray(np.isfinite(self.dequantize(codes, scales)).all(-1))
        codes[~storable] = 0
        return codes, scales, storable

    @abstractmethod
    def _round(self, rows: Floats) -> NDArray[np.uint16]: ...


@register
class BF16(_Half):
    """bfloat16: the upper half of a float32."""

    name = "bf16"

    def _round(self, rows: Floats) -> NDArray[np.uint16]:
        bits = np.ascontiguousarray(rows).view(np.uint32)
        upper = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
        # Rounding a NaN could carry into its sign, so it is truncated and kept a NaN.
        return np.where(np.isnan(rows), bits >> 16 | 1, upper).astype(np.uint16)

    def dequantize(self, codes: Array, scales: Array) -> Floats:
        self._check_stored(codes, scales)
        return (codes.astype(np.uint32) << 16).view(np.float32)


@register
class FP16(_Half):
    """IEEE binary16; a magnitude that rounds beyond 65504 is refused."""

    name = "fp16"

    def _round(self, rows: Floats) -> NDArray[np.uint16]:
        with np.errstate(over="ignore", under="ignore"):
            return rows.astype(np.float16).view(np.uint16)

    def dequantize(self, codes: Array, scales: Array) -> Floats:
        self._check_stored(codes, scales)
        return codes.view(np.float16).astype(np.float32)
