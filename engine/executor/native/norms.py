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


class NativeGatedRMSNorm(Module):
    """An RMS norm and silu of a gate, as gated delta nets end: ``norm(x) silu(gate)``, or with ``gate_first``
    ``norm(x silu(gate))``, as Mamba-2's."""

    fuse: bool
    eps: float
    gate_first: bool
    plain: type[Module]  # model code's own

    def __call__(self, x: mx.array, gate: mx.array | None = None) -> mx.array:
        weight = self["weight"]
        if (
            gate is None
            or gate.shape != x.shape
            or gate.dtype != x.dtype
            or mx.result_type(x, weight) != x.dtype
        ):
            wide: mx.array = self.plain.__call__(self, x, gate)
            return wide
        return _gated_rms_norm(x, gate, weight, self.eps, gate_first=self.gate_first)


def _gated_rms_norm(
    x: mx.array, gate: mx.array, weight: mx.array, eps: float, *, gate_first: bool
) -> mx.array:
    if gate_first:
        return _ext.rms_norm(_ext.gated(gate, x, "silu"), weight, eps)
    return _ext.gated(gate, _ext.rms_norm(x, weight, eps), "silu")


def gate_of_rms_norm(module: Any) -> bool | None:
    """For a module of model code that is a gated RMS norm, whether its gate comes first; None for others: by
    what it holds, and by what it gives for two rows."""
    weight, eps = module.get("weight"), getattr(module, "eps", None)
    if isinstance(module, NativeGatedRMSNorm) or not isinstance(eps, float) or module.children():
        return None
    if list(module.parameters()) != ["weight"] or weight.ndim != 1 or weight.dtype not in FLOATS:
        return None
    x, gate = (
        (scale * mx.sin(step * mx.arange(2 * weight.size))).reshape(2, -1).astype(weight.dtype)
        for scale, step in ((1.0, 1.0), (3.0, 0.7))
    )
    try:
        given = module(x, gate)
    except Exception:  # model code that wants something else: then it is not this norm
        return None
    if not isinstance(given, mx.array) or given.shape != x.shape or given.dtype != x.dtype:
        return None
    for gate_first in (False, True):
        if _error(given, _gated_rms_norm(x, gate, weight, eps, gate_first=gate_first)) <= 0.02:
            return gate_first
    return None


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
