"""Blocks of GGUF's quantized tensors as MLX's affine groups, and everything else as 16-bit floats.

A block of Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0 holds 32 codes and one scale (and minimum) in float16: that is an
affine group of
32, so these tensors keep their values exactly. Source of the layouts: ggml's ``ggml-common.h``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
GROUP_SIZE = 32
AFFINE = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8}  # format -> bits


class Affine(NamedTuple):
    """Weight = scale * code + bias, a scale and a bias per 32 codes.

    weight  packed codes, uint32 [..., inputs * bits / 32]
    scales  float16 [..., inputs / 32]; biases alike
    """

    weight: Array
    scales: Array
    biases: Array


def affine(kind: str, blocks: Array) -> Affine:
    """Return a tensor's blocks, uint8 [..., bytes of a row], as affine groups. ``kind`` is one of AFFINE."""
    bits = AFFINE[kind]
    has_minimum, halves = kind.endswith("_1"), 2 if kind.endswith("_1") else 1
    size = 2 * halves + (4 if bits == 5 else 0) + (16 if bits < 8 else 32)
    rows = blocks.reshape(*blocks.shape[:-1], -1, size)
    floats = np.ascontiguousarray(rows[..., : 2 * halves]).view(np.float16)
    scales, rest = floats[..., 0], rows[..., 2 * halves :]
    if bits == 8:
        codes = (rest.view(np.int8).astype(np.int16) + 128).astype(np.uint8)
    else:
        low = rest[..., -16:]
        codes = np.concatenate((low & 15, low >> 4), axis=-1)
        if bits == 5:
            codes |= np.unpackbits(rest[..., :4], axis=-1, bitorder="little") << 4
    biases = floats[..., 1] if has_minimum else scales * np.float16(-(2 ** (bits - 1)))
    return Affine(_pack(codes, bits), scales, biases)


def _pack(codes: Array, bits: int) -> Array:
    """Return codes, uint8 [..., groups, 32], as one little-endian stream of bits, uint32 [..., groups *
    bits]."""
    flat = codes.reshape(*codes.shape[:-2], -1)
    if bits == 8:
        return np.ascontiguousarray(flat).view("<u4")
    if bits == 4:
        return np.ascontiguousarray(flat[..., ::2] | flat[..., 1::2] << 4).view("<u4")
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    stream = stream.reshape(*codes.shape[:-1], GROUP_SIZE * bits)
    packed = np.packbits(stream, axis=-1, bitorder="little")
    return packed.reshape(*codes.shape[:-2], -1).view("<u4")


def is_exact(tensor: Affine) -> bool:
    """Whether every bias fits into float16: 128 times a scale above 511 does not."""
    return bool(np.isfinite(tensor.biases).all())


def deinterleaved(array: Array, num_heads: int) -> Array:
    """Return rows [heads * dim, ...] in the order of mlx-lm's rotary embedding (halves) from llama.cpp's
    (pairs)."""
    rows = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(array.shape))


def as_dtype(array: Array, dtype: str) -> Array:
    """Return ``array`` as float16, or as the bits of bfloat16, rounded to nearest even."""
    if dtype == "float16":
        return array.astype(np.float16)
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
