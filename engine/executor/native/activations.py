"""Activation functions in one native operation each, for every model of this process.

Model code calls them by name, as attributes of ``mlx.nn`` or bound at import; both are replaced by
functions that fall through to the originals for what the kernels do not take.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn.layers.activations as mlx_activations
from mlx import nn

from octavo.kernels import _ext

FLOATS = (mx.bfloat16, mx.float16, mx.float32)
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_approx": "gelu_tanh", "gelu_fast_approx": "gelu_sigmoid"}
"""Functions of ``mlx.nn`` and what the kernels call them."""


def replace_activations() -> tuple[str, ...]:
    """Bind ours wherever MLX's and mlx-lm's are bound now; the names of what runs natively.

    Call it again after more model code was imported.
    """
    done = []
    for name, kind in ACTIVATIONS.items():
        original = getattr(mlx_activations, name)
        ours = original if _is_ours(original) else _activation(original, kind)
        _rebind(name, ours.original, ours)
        done.append(name)
    models = sys.modules.get("mlx_lm.models.activations")
    if models is not None:
        original = models.swiglu
        ours = original if _is_ours(original) else _swiglu(original)
        _rebind("swiglu", ours.original, ours)
        done.append("swiglu")
    return tuple(done)


def _is_ours(function: Any) -> bool:
    return getattr(function, "original", None) is not None


def _rebind(name: str, original: Any, ours: Any) -> None:
    for path, module in list(sys.modules.items()):
        inside = path.startswith("mlx_lm.models.") or module in (mlx_activations, nn)
        if inside and getattr(module, name, None) is original:
            setattr(module, name, ours)


def _activation(original: Callable[[mx.array], mx.array], kind: str) -> Any:
    def activation(x: mx.array) -> mx.array:
        if isinstance(x, mx.array) and x.ndim > 0 and x.dtype in FLOATS and on_cpu():
            return _ext.gated(x, None, kind)
        return original(x)

    activation.original = original  # type: ignore[attr-defined]
    return activation


def _swiglu(original: Callable[[mx.array, mx.array], mx.array]) -> Any:
    def swiglu(gate: mx.array, x: mx.array) -> mx.array:
        if gate.shape == x.shape and gate.dtype == x.dtype and gate.dtype in FLOATS and on_cpu():
            return _ext.gated(gate, x, "silu")
        return original(gate, x)

    swiglu.original = original  # type: ignore[attr-defined]
    return swiglu


def on_cpu() -> bool:
    """Whether new operations go to the CPU, where alone the kernels run."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)
