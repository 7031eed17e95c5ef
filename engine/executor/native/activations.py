"""Activation functions as single native operations, for every model in this process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn.layers.activations as mlx_activations
import numpy as np
from mlx import nn

from octavo.kernels import _ext

from ..overrides import rebind

FLOATS = (mx.bfloat16, mx.float16, mx.float32)
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_approx": "gelu_tanh", "gelu_fast_approx": "gelu_sigmoid"}
"""Names of activations in ``mlx.nn`` and in the kernels."""


def replace_activations() -> dict[str, Any]:
    """Replace MLX's and mlx-lm's activations; return the native functions by name."""
    done = {}
    for path, name, compute in _OURS:
        if (module := sys.modules.get(path)) is not None:
            bound = getattr(module, name)
            ours = bound if hasattr(bound, "original") else _wrap(bound, compute)
            rebind(name, ours.original, ours, mlx_activations, nn)
            done[name] = ours
    return done


def _activation(kind: str, x: mx.array) -> mx.array | None:
    return _ext.gated(x, None, kind) if isinstance(x, mx.array) and x.ndim > 0 and x.dtype in FLOATS else None


def _swiglu(gate: mx.array, x: mx.array) -> mx.array | None:
    fits = gate.shape == x.shape and gate.dtype == x.dtype and gate.dtype in FLOATS
    return _ext.gated(gate, x, "silu") if fits else None


def _precise_swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array | None:
    return _swiglu(gate, x) if h.dtype == gate.dtype else None


def _normalize_qk(
    q: mx.array, k: mx.array, *, inv_scale: float, eps: float
) -> tuple[mx.array, mx.array] | None:
    if q.dtype not in FLOATS or k.dtype != q.dtype:
        return None
    eps *= inv_scale**2
    return (
        _ext.rms_norm(q, _constant(q.shape[-1], inv_scale**2), eps),
        _ext.rms_norm(k, _constant(k.shape[-1], inv_scale), eps),
    )


def _wrap(original: Any, compute: Callable[..., Any]) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        found = compute(*args, **kwargs) if on_cpu() else None
        return original(*args, **kwargs) if found is None else found

    function.original = original  # type: ignore[attr-defined]
    return function


_OURS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    *(
        (mlx_activations.__name__, name, functools.partial(_activation, kind))
        for name, kind in ACTIVATIONS.items()
    ),
    ("mlx_lm.models.activations", "swiglu", _swiglu),
    ("mlx_lm.models.activations", "precise_swiglu", _precise_swiglu),
    ("mlx_lm.models.gated_delta", "normalize_qk", _normalize_qk),
)
"""Replaced functions: module, name, and a native function. It returns None if the original must compute."""


@functools.cache
def _constant(size: int, value: float) -> mx.array:
    return mx.array(np.full(size, value, np.float32))


def on_cpu() -> bool:
    return _native and bool(mx.default_device().type == mx.DeviceType.cpu)


@contextmanager
def originals() -> Iterator[None]:
    global _native
    before, _native = _native, False
    try:
        yield
    finally:
        _native = before


_native = True
