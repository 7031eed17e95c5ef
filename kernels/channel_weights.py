"""Quantizes weights so that native kernels can add up all inputs of an output channel in integers.

Activations then need one scale per token instead of one per token and group. There are two kinds of weights:

w8a8   8 bits, as in vLLM and compressed-tensors: all groups of a channel have the scale ``s`` and the
       bias ``-128 s``
w4a8   4 bits with two levels of scales, as in QServe (arXiv:2405.04532): a group has the scale ``k s``
       and the bias ``-z k s`` with integers ``k`` and ``z``; a weight ``s k (q - z)`` is a whole multiple of
       ``s`` in 8 bits

MLX's affine format stores both kinds exactly, so every backend can compute with them, and the code that packs
weights for native kernels recognizes them. To make that possible, the scales ``s`` of w4a8 are powers of two:
``k s`` and ``z k s`` are then exact in bfloat16.

These MLX operations are the definition. Native kernels compute the same bits in parallel
(``csrc/linear/quantize_channels_portable.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

Quantized = tuple[mx.array, mx.array, mx.array]  # codes, scales, biases

MIDDLE = 128  # code of the value zero
LARGEST = 127  # largest distance of a code from MIDDLE
LARGEST_FACTOR = 16  # largest k of a group; k times 15, the largest code, fits into a byte
LARGEST_WEIGHT = 115  # largest |weight| / s; rounding k and z adds at most 12, so that it fits into a byte
LEAST_SCALE = 2.0**-24  # smallest positive float16
_ROWS = 1024  # rows per operation, because a whole vocabulary in float32 would be larger than the model


def quantize_channels(weight: mx.array, group_size: int) -> Quantized:
    """Quantize floats [..., outputs, inputs] to w8a8.

    Returns codes uint32 [..., outputs, inputs / 4], and scales and biases [..., outputs, inputs / group_size]
    of the weight's dtype. A weight ``w`` in a channel of scale ``s = max|w| / 127`` has the code
    ``round(w / s) + 128``. Its error is at most ``s / 2``, plus what rounding the scale to its dtype changes
    the largest weight by."""
    return _by_rows(_quantize_rows, weight, group_size)


def quantize_two_levels(weight: mx.array, group_size: int) -> Quantized:
    """Quantize floats [..., outputs, inputs] to w4a8.

    Returns codes uint32 [..., outputs, inputs / 8], and scales and biases [..., outputs, inputs / group_size]
    of the weight's dtype. The step of a group is ``(max - min) / 15``. A channel's ``s`` is the least power
    of two for which no weight of the channel exceeds 115 ``s`` and no step of its groups exceeds 16 ``s``. A
    group's ``k`` is its step divided by ``s``, rounded. Errors are at most ``k s / 2``, or ``(k + 8) s`` if
    the range of the group had to be cut."""
    return _by_rows(_quantize_rows_twice, weight, group_size)


def _by_rows(quantize: Callable[[mx.array, int], Quantized], weight: mx.array, group_size: int) -> Quantized:
    rows = weight.reshape(-1, weight.shape[-1])
    parts = [quantize(rows[at : at + _ROWS], group_size) for at in range(0, rows.shape[0], _ROWS)]
    codes, scales, biases = (mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True))
    leading = weight.shape[:-1]
    return codes.reshape(*leading, -1), scales.reshape(*leading, -1), biases.reshape(*leading, -1)


def _quantize_rows(rows: mx.array, group_size: int) -> Quantized:
    values = rows.astype(mx.float32)
    scale = (mx.max(mx.abs(values), axis=-1, keepdims=True) / LARGEST).astype(rows.dtype)
    step = scale.astype(mx.float32)
    code = mx.round(values * mx.where(step > 0, 1 / step, 0))
    codes = _whole(mx.clip(code, -LARGEST, LARGEST) + MIDDLE, mx.uint8)
    shape = (rows.shape[0], rows.shape[1] // group_size)
    scales = mx.contiguous(mx.broadcast_to(scale, shape))
    return codes.view(mx.uint32), scales, -MIDDLE * scales


def _quantize_rows_twice(rows: mx.array, group_size: int) -> Quantized:
    values = rows.astype(mx.float32).reshape(len(rows), -1, group_size)
    least = mx.minimum(mx.min(values, axis=-1, keepdims=True), 0)
    most = mx.maximum(mx.max(values, axis=-1, keepdims=True), 0)
    step = (most - least) / 15
    unit = mx.maximum(step / LARGEST_FACTOR, mx.maximum(most, -least) / LARGEST_WEIGHT)
    unit = mx.maximum(mx.max(unit, axis=1, keepdims=True), LEAST_SCALE)
    scale = mx.power(2.0, mx.ceil(mx.log2(unit)))
    step = mx.maximum(mx.round(step / scale), 1) * scale
    zero = mx.clip(mx.round(7.5 - (least + most) / (2 * step)), 0, 15)
    codes = _whole(mx.clip(mx.round(values / step) + zero, 0, 15), mx.uint32).reshape(len(rows), -1, 8)
    packed = mx.sum(codes << mx.arange(0, 32, 4, dtype=mx.uint32), axis=-1).astype(mx.uint32)
    return packed, step[..., 0].astype(rows.dtype), (-zero * step)[..., 0].astype(rows.dtype)


def _whole(codes: mx.array, dtype: mx.Dtype) -> mx.array:
    """Convert to integers. NaN becomes 0, because its conversion differs between machines."""
    return mx.where(mx.isnan(codes), 0, codes).astype(dtype)


QUANTIZE = {"w8a8": quantize_channels, "w4a8": quantize_two_levels}
BITS = {"w8a8": 8, "w4a8": 4}


def quantize_as(kind: str, arrays: Sequence[mx.array], group_size: int) -> Quantized:
    """Quantize ``arrays`` as ``kind``: either one array of floats, or MLX's affine codes, scales and biases
    of the same bits and group size. The result has the dtype of the floats or of the scales."""
    if len(arrays) == 1:
        return QUANTIZE[kind](arrays[0], group_size)
    codes, scales, biases = arrays
    return QUANTIZE[kind](mx.dequantize(codes, scales, biases, group_size, BITS[kind]), group_size)
