"""Self-test of recurrent kernels on this device, run when a model first needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..recurrent_kernels import DeltaGates, SsdParameters
from ..reference import recurrent as truth
from ..state_segments import NO_STATE, StateSegments
from .launch import KernelLibrary
from .recurrent import MetalRecurrences, SegmentArrays

_STEP = StateSegments.of([1, 9, 3], source=[0, NO_STATE, 2], target=[0, 1, 3], checkpoints=[(4, 4)])
_ROWS, _SLOTS = 13, 5
_WRITTEN = (0, 1, 3, 4)
_KEY_HEADS, _HEADS, _DIM = 2, 4, 64
_LIMIT = 1e-4
"""Of the largest value: sums of 64 products in float32, exponentials as GPUs have them."""

Array = NDArray[Any]
Check = Callable[[MetalRecurrences, np.random.Generator], tuple[list[mx.array], list[Array]]]


def recurrent_problem(library: KernelLibrary) -> str | None:
    """Return one line about wrong recurrent kernels, or None if they pass."""
    kernels = MetalRecurrences(library)
    for name, check in (("delta rule", _delta), ("SSD", _ssd), ("convolution", _conv)):
        try:
            got, wanted = check(kernels, np.random.default_rng(0))
            mx.eval(got)
        except RuntimeError as failed:  # a kernel does not compile or launch
            return f"{name}: {(str(failed).strip() or type(failed).__name__).splitlines()[0]}"
        for what, array, exact in zip(("outputs", "states"), got, wanted, strict=True):
            error = float(np.abs(np.array(array) - exact).max() / np.abs(exact).max())
            if not error < _LIMIT:  # also true for NaN
                return f"{name}: {what} are off by {error:.2g} of the largest, {_LIMIT} is the most"
    return None


def _delta(kernels: MetalRecurrences, rng: np.random.Generator) -> tuple[list[mx.array], list[Array]]:
    q, k = (_normal(rng, _ROWS, _KEY_HEADS, _DIM) / 8 for _ in range(2))
    v, a, b = (_normal(rng, _ROWS, *shape) for shape in ((_HEADS, _DIM), (_HEADS,), (_HEADS,)))
    A_log, dt_bias = _normal(rng, _HEADS), _normal(rng, _HEADS)
    states = _normal(rng, _SLOTS, _HEADS, _DIM, _DIM)
    gates = DeltaGates(kind="softplus", A_log=mx.array(A_log), dt_bias=mx.array(dt_bias))
    pool = _pool(states)
    rows = (mx.array(x) for x in (q, k, v, a, b))
    _, y = kernels.gated_delta(pool, SegmentArrays.of(_STEP), *rows, gates=gates)
    g = truth.delta_decay(a, A_log, dt_bias)
    exact = truth.gated_delta(states, _STEP, q, k, v, g, truth.sigmoid(b))
    return _results(pool, y), [exact, states[list(_WRITTEN)]]


def _ssd(kernels: MetalRecurrences, rng: np.random.Generator) -> tuple[list[mx.array], list[Array]]:
    x, dt = _normal(rng, _ROWS, _HEADS, _DIM), _normal(rng, _ROWS, _HEADS)
    B, C = (_normal(rng, _ROWS, _KEY_HEADS, _DIM) for _ in range(2))
    A_log, dt_bias, D = (_normal(rng, _HEADS) for _ in range(3))
    states = _normal(rng, _SLOTS, _HEADS, _DIM, _DIM)
    parameters = SsdParameters(A_log=mx.array(A_log), dt_bias=mx.array(dt_bias), D=mx.array(D))
    pool = _pool(states)
    rows = (mx.array(part) for part in (x, B, C, dt))
    _, y = kernels.ssd(pool, SegmentArrays.of(_STEP), *rows, parameters=parameters)
    exact = truth.ssd(states, _STEP, x, B, C, truth.softplus(dt + dt_bias), A_log, D)
    return _results(pool, y), [exact, states[list(_WRITTEN)]]


def _conv(kernels: MetalRecurrences, rng: np.random.Generator) -> tuple[list[mx.array], list[Array]]:
    x, weight, windows = _normal(rng, _ROWS, 80), _normal(rng, 4, 80), _normal(rng, _SLOTS, 3, 80)
    pool = _pool(windows)
    _, y = kernels.causal_conv(pool, SegmentArrays.of(_STEP), mx.array(x), mx.array(weight), silu=True)
    exact = truth.causal_conv(windows, _STEP, x, weight, None, silu=True)
    return _results(pool, y), [exact, windows[list(_WRITTEN)]]


def _normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


def _pool(states: Array) -> mx.array:
    """Return the states as a new, evaluated array."""
    pool = mx.array(states)
    mx.eval(pool)
    return pool


def _results(pool: mx.array, y: mx.array) -> list[mx.array]:
    mx.eval(y)  # the kernel writes the pool without MLX knowing
    return [y, pool[mx.array(_WRITTEN)]]
