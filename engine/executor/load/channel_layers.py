"""Quantized layers with one weight scale per output channel; see ``kernels.channel_weights``."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from octavo.kernels.channel_weights import BITS

from ..model_ops import ModelOps


def can_become(module: Module, kind: str) -> bool:
    """Whether MLX's quantized ``module`` has affine weights with the bits of ``kind``."""
    bits, mode = getattr(module, "bits", None), getattr(module, "mode", "affine")
    return bits is not None and mode == "affine" and bits == BITS.get(kind)


def affine_arrays(module: Any) -> tuple[mx.array, ...]:
    """Return the weight arrays of an affine-quantized module."""
    return module.weight, module.scales, module.biases


def put_channels(module: Any, arrays: tuple[mx.array, ...], kind: str, ops: ModelOps) -> None:
    """Replace the weights of a quantized module by weights with one scale per channel. ``arrays`` hold floats
    or affine weights, [outputs, inputs], or one such matrix per expert."""
    module.weight, module.scales, module.biases = ops.quantize_channels(kind, arrays, module.group_size)
    module.channel_kind = kind


def channel_kind(module: Module) -> str | None:
    """Return ``w8a8`` or ``w4a8`` if a module has such weights, else None."""
    kind: str | None = getattr(module, "channel_kind", None)
    return kind
