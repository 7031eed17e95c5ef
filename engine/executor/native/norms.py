from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import LayerNorm, RMSNorm

from octavo.kernels import _ext

from .activations import FLOATS


class NativeRMSNorm(RMSNorm):
    fuse: bool

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        if mx.result_type(x, weight) != x.dtype:
            wide: mx.array = RMSNorm.__call__(self, x)
            return wide
        return _ext.rms_norm(x, weight, self.eps, fuse=self.fuse)


class NativeLayerNorm(LayerNorm):
    fuse: bool

    def __call__(self, x: mx.array) -> mx.array:
        weight, bias = self.get("weight"), self.get("bias")
        for parameter in (weight, bias):
            if parameter is not None and mx.result_type(x, parameter) != x.dtype:
                wide: mx.array = LayerNorm.__call__(self, x)
                return wide
        return _ext.layer_norm(x, weight, bias, self.eps, fuse=self.fuse)


class NativeShiftedRMSNorm(Module):
    """Native RMS norm that multiplies by the stored weight plus one, as in gemma."""

    fuse: bool
    eps: float
    plain: type[Module]

    def __call__(self, x: mx.array) -> mx.array:
        gain = 1.0 + self["weight"]
        if mx.result_type(x, gain) != x.dtype:
            wide: mx.array = self.plain.__call__(self, x)
            return wide
        return _ext.rms_norm(x, gain, self.eps, fuse=self.fuse)


class NativeGatedRMSNorm(Module):
    """Native RMS norm with a silu gate: ``norm(x) silu(gate)``, as in gated delta nets.

    With ``gate_first``: ``norm(x silu(gate))``, as in Mamba-2. With a ``norm_group_size``, groups of values
    are normalized separately, as in Nemotron-H.
    """

    fuse: bool
    eps: float
    gate_first: bool
    norm_group_size: int | None
    plain: type[Module]

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
        if not self.gate_first:
            return _ext.gated(gate, _ext.rms_norm(x, weight, self.eps), "silu")
        x = _ext.gated(gate, x, "silu")
        if self.norm_group_size is None:
            return _ext.rms_norm(x, weight, self.eps)
        groups = mx.unflatten(x, -1, (-1, self.norm_group_size))
        normed: mx.array = weight * _ext.rms_norm(groups, None, self.eps).flatten(-2)
        return normed


@dataclass(frozen=True, slots=True)
class NormKind:
    gate_first: bool | None = None
    grouped: bool = False


_KINDS = {
    "return mx.fast.rms_norm(x, 1.0 + self.weight, self.eps)": NormKind(),
    "return mx.fast.rms_norm(x, weight=1.0 + self.weight, eps=self.eps)": NormKind(),
    """weight = (1.0 + self.weight).astype(x.dtype)
return mx.fast.rms_norm(x, weight, self.eps)""": NormKind(),
    """if gate is not None:
    hidden_states = swiglu(gate, hidden_states)
return mx.fast.rms_norm(hidden_states, self.weight, self.eps)""": NormKind(gate_first=True),
    """if gate is not None:
    x = swiglu(gate, x)
x = mx.unflatten(x, axis=-1, shape=(-1, self.group_size))
x = mx.fast.rms_norm(x, weight=None, eps=self.eps)
return self.weight * x.flatten(-2)""": NormKind(gate_first=True, grouped=True),
    """normed = mx.fast.rms_norm(x, self.weight, self.eps)
return precise_swiglu(x, gate, normed)""": NormKind(gate_first=False),
    """x = mx.fast.rms_norm(hidden_states, self.weight, self.eps)
if gate is not None:
    return precise_swiglu(hidden_states, gate, x)
else:
    return x.astype(hidden_states.dtype)""": NormKind(gate_first=False),
}
"""Kinds of norms by the source of ``__call__``."""


def kind_of_norm(module: Any) -> NormKind | None:
    """Return the kind of a norm in model code; None if it has no native replacement."""
    weight = module.get("weight")
    if not isinstance(weight, mx.array) or weight.ndim != 1 or weight.dtype not in FLOATS:
        return None
    if not isinstance(getattr(module, "eps", None), float) or list(module.parameters()) != ["weight"]:
        return None
    return _KINDS.get(_body(type(module).__call__))


@functools.cache
def _body(call: Any) -> str:
    try:
        source = inspect.getsource(call.__code__)
    except (AttributeError, OSError):
        return ""
    (function,) = ast.parse(textwrap.dedent(source)).body
    return "\n".join(map(ast.unparse, getattr(function, "body", ())))
