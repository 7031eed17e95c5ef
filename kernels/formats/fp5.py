"""fp5: fp4 with one more fraction bit, in exactly 5 bits per value, scale included.

The upper four bits of a value are an E2M1 code, stored as in fp4. The first eight values of a row have no
lowest bit; the row's scale takes the place of these bits.

codes   [D/8] uint32   nibble i of word j: sign and upper three bits of value 8 j + i
scales  [D/8] uint8    byte 0: the scale, E5M3; bit i of byte j > 0: lowest bit of value 8 j + i

Codes and scales are bit-equal on every backend: docs/spec/page-formats.md defines each operation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from . import e2m1
from .base import Array, Bools, Floats, PageFormat, register, zero_nonfinite
from .packing import pack, unpack

MAGNITUDES = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7], np.float32)
"""Values of E2M2 codes 0..15; even codes have the values of E2M1."""

_VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])

EDGES = tuple((float(MAGNITUDES[i] + MAGNITUDES[i + 1]) / 2, bool(i % 2)) for i in range(15))
"""Boundaries of |x| / scale between neighbouring magnitudes, and whether a tie takes the upper index."""

COARSE = 8
"""Number of values at a row's start that are E2M1; the byte for their lowest bits has the scale instead."""

SCALE_FACTOR = np.float32(1 / 7)
MAX_SCALE = np.float32(61440)
STEPS = (0, 1, 2, 3, 6)
"""Candidate scales, as numbers of E5M3 steps above absmax / 7, tried in this order. They were chosen among
-4..6 for the smallest relative RMS error on rotated Gaussian, Laplace and outlier rows: 0.056 for rows of 64
values and 0.055 for 128. Step 0 alone gives 0.065 and 0.060; all eleven steps give 0.055 and 0.055."""


@register
class FP5(PageFormat):
    name = "fp5"
    scale_dtype = np.uint8
    code_bits = 4
    rotates = True

    def scales_per_row(self, head_dim: int) -> int:
        return head_dim // 8

    def encode(self, rows: Floats) -> tuple[Array, Array, Bools]:
        rows, storable = zero_nonfinite(rows)
        magnitudes = np.abs(rows)
        candidates = _candidates(magnitudes)
        scales, indices = e2m1.best_scale(candidates, magnitudes, _nearest_index, MAGNITUDES)
        codes = e2m1.signed_codes(rows, indices >> np.uint8(1), scale_values(scales))
        low_bits = np.where(scales == 0, np.uint8(0), indices & np.uint8(1))
        planes = np.packbits(low_bits, axis=-1, bitorder="little")
        planes[..., :1] = scales
        return pack(codes, 4), planes, storable

    def dequantize(self, codes: Array, scales: Array) -> Floats:
        self._check_stored(codes, scales)
        nibbles = unpack(codes, 4)
        low_bits = np.unpackbits(scales, axis=-1, bitorder="little")
        low_bits[..., :COARSE] = 0
        values: Floats = _VALUES[nibbles << np.uint8(1) | low_bits]
        with np.errstate(invalid="ignore"):
            return values * scale_values(scales[..., :1])


def scale_values(scales: NDArray[np.uint8]) -> Floats:
    """Return float32 values of E5M3 bytes; bytes above 247 are never stored."""
    return (scales.astype(np.uint16) << np.uint16(7)).view(np.float16).astype(np.float32)


def _candidates(magnitudes: Floats) -> Iterator[e2m1.Candidate]:
    absmax = magnitudes.max(-1, keepdims=True)
    half = np.minimum(absmax * SCALE_FACTOR, MAX_SCALE).astype(np.float16)
    base = np.maximum(half.view(np.uint16) >> np.uint16(7), 1)
    for step in STEPS:
        byte = np.minimum(base + step, 247).astype(np.uint8)
        yield byte, scale_values(byte), half > 0


def _nearest_index(magnitudes: Floats, scale: Floats) -> NDArray[np.uint8]:
    index = e2m1.nearest_index(magnitudes, scale, EDGES)
    index[..., :COARSE] = e2m1.nearest_index(magnitudes[..., :COARSE], scale) << np.uint8(1)
    return index
