"""MLX norms that compute in one native operation (MLX's own are chains of several on the CPU).

Made in place, like the modules of ``linear``. ``fuse`` lets a norm take over the addition before it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import LayerNorm, RMSNorm

from octavo.kernels import _ext

from .activations import FLOATS


class NativeRMSNorm(RMSNorm):
    """``nn.RMSNorm``."""

    fuse: bool

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        if mx.result_type(x, weight) != x.dtype:  # the result would be wider than x
            wide: mx.array = RMSNorm.__call__(self, x)
            return wide
        return _ext.rms_norm(x, weight, self.eps, fuse=self.fuse)


class NativeLayerNorm(LayerNorm):
    """``nn.LayerNorm``, with or without weight and bias."""

    fuse: bool

    def __call__(self, x: mx.array) -> mx.array:
        weight, bias = self.get("weight"), self.get("bias")
        for parameter in (weight, bias):
            if parameter is not None and mx.result_type(x, parameter) != x.dtype:
                wide: mx.array = LayerNorm.__call__(self, x)
                return wide
        return _ext.layer_norm(x, weight, bias, self.eps, fuse=self.fuse)


class NativeShiftedRMSNorm(Module):
    """An RMS norm by the weight plus one, as gemma's models store theirs."""

    fuse: bool
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        gain = 1.0 + self["weight"]
        if mx.result_type(x, gain) != x.dtype:
            return mx.fast.rms_norm(x, gain, self.eps)
        return _ext.rms_norm(x, gain, self.eps, fuse=self.fuse)


def is_shifted_rms_norm(module: Any) -> bool:
    """Whether a module of model code is an RMS norm by its ``weight`` plus one: by what it holds, and
    by what it gives for two rows."""
    weight, eps = module.get("weight"), getattr(module, "eps", None)
    if (
        isinstance(module, NativeShiftedRMSNorm)
        or not isinstance(eps, float)
        or list(module.parameters()) != ["weight"]
        or module.children()
    ):
        return False
    if weight.ndim != 1 or weight.dtype not in FLOATS:
        return False
    size = weight.size
    x = mx.sin(mx.arange(2 * size)).reshape(2, size).astype(weight.dtype)
    try:
        given = module(x)
    except Exception:  # model code that wants something else: then it is not this norm
        return False
    if given.shape != x.shape or given.dtype != x.dtype:
        return False
    errors = [_error(given, _ext.rms_norm(x, weight + shift, eps)) for shift in (1.0, 0.0)]
    return errors[0] <= 0.02 and errors[0] < errors[1]


def _error(given: mx.array, wanted: mx.array) -> float:
    """The largest difference, as a share of the largest wanted value."""
    given, wanted = given.astype(mx.float32), wanted.astype(mx.float32)
    difference, largest = mx.abs(given - wanted).max(), mx.abs(wanted).max()
    error: float = (difference / mx.maximum(largest, 1e-30)).item()  # type: ignore[assignment]
    return error
