"""Layers whose weights have one scale per output channel; see ``kernels.channel_weights``."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from octavo.kernels.channel_weights import BITS, QUANTIZE


def can_become(module: Module, kind: str) -> bool:
    """Whether MLX's quantized ``module`` has affine weights of as many bits as ``kind``."""
    bits, mode = getattr(module, "bits", None), getattr(module, "mode", "affine")
    return bits is not None and mode == "affine" and bits == BITS.get(kind)


def dequantized(module: Any) -> mx.array:
    """The weights of a module that has affine ones, lazily, in the type of its scales."""
    return mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)


def put_channels(module: Any, weight: mx.array, kind: str) -> None:
    """Let a quantized module of as many bits as ``kind`` have ``weight``, [outputs, inputs] or one of each
    expert, by channels."""
    module.weight, module.scales, module.biases = QUANTIZE[kind](weight, module.group_size)
    module.channel_kind = kind


def channel_kind(module: Module) -> str | None:
    """``w8a8`` or ``w4a8`` for a module that has such weights."""
    kind: str | None = getattr(module, "channel_kind", None)
    return kind
