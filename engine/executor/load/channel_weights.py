"""Weights in 8 bits with one scale per output channel, as vLLM and compressed-tensors have them ("W8A8").

They are kept in MLX's affine format, whose groups of a row then all have the same scale ``s`` and the
bias ``-128 s``: every backend can compute with them, and native kernels see that one sum over all inputs
will do. There, activations get one scale per token in place of one per token and group.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

BITS = 8
MIDDLE = 128  # the code of zero
LARGEST = 127  # codes are symmetric around it
_ROWS = 4096  # at once: a vocabulary in float32 would take more than the model


def quantize_channels(weight: mx.array, group_size: int) -> tuple[mx.array, mx.array, mx.array]:
    """Floats [..., outputs, inputs] -> codes uint32 [..., outputs, inputs / 4], scales and biases
    [..., outputs, inputs / group_size] of the weight's type.

    A weight ``w`` of a channel of scale ``s = max|w| / 127`` has the code ``round(w / s) + 128``; its error
    is at most ``s / 2``, and as much again as rounding the scale to its type moves the largest weight.
    """
    rows = weight.reshape(-1, weight.shape[-1])
    parts = [_quantize_rows(rows[at : at + _ROWS], group_size) for at in range(0, rows.shape[0], _ROWS)]
    codes, scales, biases = (mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True))
    leading = weight.shape[:-1]
    return tuple(a.reshape(*leading, -1) for a in (codes, scales, biases))  # type: ignore[return-value]


def _quantize_rows(rows: mx.array, group_size: int) -> tuple[mx.array, mx.array, mx.array]:
    values = rows.astype(mx.float32)
    scale = (mx.max(mx.abs(values), axis=-1, keepdims=True) / LARGEST).astype(rows.dtype)
    step = scale.astype(mx.float32)
    code = mx.round(values * mx.where(step > 0, 1 / step, 0))
    codes = (mx.clip(code, -LARGEST, LARGEST) + MIDDLE).astype(mx.uint8)
    shape = (rows.shape[0], rows.shape[1] // group_size)
    scales = mx.contiguous(mx.broadcast_to(scale, shape))
    return codes.view(mx.uint32), scales, -MIDDLE * scales


def is_int8(module: Module) -> bool:
    """Whether MLX's quantized ``module`` has affine weights of 8 bits."""
    return getattr(module, "bits", None) == BITS and getattr(module, "mode", "affine") == "affine"


def dequantized(module: Any) -> mx.array:
    """The weights of a module that has affine ones, lazily, in the type of its scales."""
    return mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)


def put_channels(module: Any, weight: mx.array) -> None:
    """Let a quantized module of 8 bits have ``weight``, [outputs, inputs] or one per expert, by channels."""
    module.weight, module.scales, module.biases = quantize_channels(weight, module.group_size)
    module.channel_scales = True


def has_channel_scales(module: Module) -> bool:
    return getattr(module, "channel_scales", False)
