"""fp4: E2M1 codes, eight to a uint32, with one fp16 scale per row.

Codes and scales are bit-equal on every backend: docs/spec/page-formats.md defines each operation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .base import MAX_FP16, Array, Bools, Floats, PageFormat, register, zero_nonfinite
from .e2m1 import Candidate, best_scale, signed_codes, values_of
from .packing import pack, unpack

SCALE_FACTORS = (np.array([1.0, 0.94, 0.88, 1.08, 1.36]) / 6).astype(np.float32)
"""Candidate scales of a row are its absmax times each of these factors, tried in this order. Factors from
0.60 / 6 to 1.80 / 6 were searched for the smallest relative RMS error on Gaussian, Laplace and outlier rows.
It falls from 0.105 to 0.098 for 64 values, and from 0.109 to 0.103 for 128. An exhaustive search of scales
reaches 0.096 and 0.101."""


@register
class FP4(PageFormat):
    """fp4; the first of eight codes is in the lowest four bits of a uint32."""

    name = "fp4"
    code_bits = 4
    rotates = True

    def encode(self, rows: Floats) -> tuple[Array, Array, Bools]:
        rows, storable = zero_nonfinite(rows)
        magnitudes = np.abs(rows)
        scales, indices = best_scale(_candidates(magnitudes), magnitudes)
        return pack(signed_codes(rows, indices, scales.astype(np.float32)), 4), scales, storable

    def dequantize(self, codes: Array, scales: Array) -> Floats:
        self._check_stored(codes, scales)
        return values_of(unpack(codes, 4)) * scales.astype(np.float32)


def _candidates(magnitudes: Floats) -> Iterator[Candidate]:
    absmax = magnitudes.max(-1, keepdims=True)
    for factor in SCALE_FACTORS:
        half = np.minimum(absmax * factor, MAX_FP16).astype(np.float16)
        yield half, half.astype(np.float32), half > 0
