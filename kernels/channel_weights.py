"""Weights with one scale per output channel, so that kernels can add up integers.

w8a8   8 bits, as in vLLM and compressed-tensors: scale ``s`` and bias ``-128 s`` per channel
w4a8   4 bits, as in QServe (arXiv:2405.04532): scale ``k s`` and bias ``-z k s`` per group, with
       integers ``k`` and ``z``; ``s`` is a power of two, so bfloat16 holds ``k s`` and ``z k s``

MLX's affine format stores both kinds exactly. Native kernels produce bit-identical weights in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

Quantized = tuple[mx.array, mx.array, mx.array]  # codes, scales, biases

MIDDLE = 128  # code of the value zero
LARGEST = 127
MAX_FACTOR = 16
MAX_WEIGHT = 115
MIN_SCALE = 2.0**-24  # smallest positive float16
_ROWS = 1024  # rows per operation, to limit memory


def quantize_channels(weight: mx.array, group_size: int) -> Quantized:
    """Quantize floats [..., outputs, inputs] to w8a8.

    Returns codes uint32 [..., outputs, inputs / 4], and scales and biases [..., outputs, inputs / group_size]
    of the weight's dtype. ``s = max|w| / 127`` per channel, and the code of w is ``round(w / s) + 128``.
    """
    return _by_rows(_quantize_rows, weight, group_size)


def quantize_two_levels(weight: mx.array, group_size: int) -> Quantized:
    """Quantize floats [..., outputs, inputs] to w4a8.

    Returns codes uint32 [..., outputs, inputs / 8], and scales and biases [..., outputs, inputs / group_size]
    of the weight's dtype. A group's step is ``(max - min) / 15``. A channel's ``s`` is the least power of two
    for which no weight exceeds 115 ``s`` and no step exceeds 16 ``s``. A group's ``k`` is ``round(step /
    s)``.
    """
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
    unit = mx.maximum(step / MAX_FACTOR, mx.maximum(most, -least) / MAX_WEIGHT)
    unit = mx.maximum(mx.max(unit, axis=1, keepdims=True), MIN_SCALE)
    scale = mx.power(2.0, mx.ceil(mx.log2(unit)))
    step = mx.maximum(mx.round(step / scale), 1) * scale
    zero = mx.clip(mx.round(7.5 - (least + most) / (2 * step)), 0, 15)
    codes = _whole(mx.clip(mx.round(values / step) + zero, 0, 15), mx.uint32).reshape(len(rows), -1, 8)
    packed = mx.sum(codes << mx.arange(0, 32, 4, dtype=mx.uint32), axis=-1).astype(mx.uint32)
    return packed, step[..., 0].astype(rows.dtype), (-zero * step)[..., 0].astype(rows.dtype)


def _whole(codes: mx.array, dtype: mx.Dtype) -> mx.array:
    return mx.where(mx.isnan(codes), 0, codes).astype(dtype)


QUANTIZE = {"w8a8": quantize_channels, "w4a8": quantize_two_levels}
BITS = {"w8a8": 8, "w4a8": 4}


def quantize_as(kind: str, arrays: Sequence[mx.array], group_size: int) -> Quantized:
    """Quantize ``arrays`` to this kind.

    arrays   one array of floats, or MLX's affine codes, scales and biases of equal bits and group size
    """
    if len(arrays) == 1:
        return QUANTIZE[kind](arrays[0], group_size)
    codes, scales, biases = arrays
    return QUANTIZE[kind](mx.dequantize(codes, scales, biases, group_size, BITS[kind]), group_size)
