"""Recurrent layers on Metal: one launch computes all segments of a step.

Kernels write states in place. MLX does not see that, so later readers of the pool must wait for y. Only one
step with states may be in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..recurrent_kernels import GATES
from ..reference import recurrent as truth
from ..state_segments import NO_STATE, StateSegments
from .launch import Kernel, KernelLibrary, Launch, padded, wide
from .recurrent_units import CONV_THREADS, MatrixState, conv_unit, delta_unit, ssd_unit, takes_width


@dataclass(frozen=True, slots=True)
class SegmentArrays:
    num_segments: int
    segments: mx.array
    checkpoints: mx.array
    left: mx.array | None

    @classmethod
    def of(cls, step: StateSegments) -> SegmentArrays:
        kept = step.checkpoints[step.checkpoints[:, 0] >= 0]
        kept = kept[np.argsort(kept[:, 0], kind="stable")]
        used = step.segments[step.segments[:, 1] > 0]
        bounds = [np.searchsorted(kept[:, 0], at) for at in (used[:, 0], used[:, 0] + used[:, 1])]
        rows = np.zeros((len(used), 8), np.int32)
        rows[:, :4], rows[:, 4], rows[:, 5] = used, *bounds
        left = np.union1d(used[:, 0] + used[:, 1] - 1, kept[:, 0]).astype(np.int32)
        return cls(
            len(used),
            mx.array(rows),
            padded(kept.astype(np.int32).ravel()),
            None if len(left) == step.num_rows else mx.array(left),
        )


class MetalRecurrences:
    bind = None

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library
        self._numbers: dict[tuple[float, float], mx.array] = {}

    def arrays(self, step: StateSegments) -> SegmentArrays:
        return SegmentArrays.of(step)

    def zeros(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        return mx.zeros(shape, dtype)

    def mark_nonfinite(self, flags: mx.array, step: SegmentArrays, y: mx.array) -> mx.array:
        last = y if step.left is None else y[step.left]
        finite = mx.isfinite(last.reshape(last.shape[0], -1).astype(mx.float32).sum(axis=1))
        bad = mx.logical_not(finite).astype(mx.int32)
        return flags + bad if step.left is None else flags.at[step.left].add(bad)

    def rows_behind(self, window: mx.array, keep: int) -> mx.array:
        return window[0, keep:]

    def takes(self, name: str, width: int) -> bool:
        return name in ("gated_delta", "ssd") and takes_width(width)

    def recurrence(
        self,
        name: str,
        pool: mx.array,
        step: SegmentArrays,
        inputs: Sequence[mx.array],
        options: Sequence[float] = (),
    ) -> tuple[mx.array, mx.array]:
        compute = {"gated_delta": self._gated_delta, "ssd": self._ssd, "causal_conv": self._causal_conv}
        return compute[name](pool, step, inputs, options)

    def _gated_delta(
        self, pool: mx.array, step: SegmentArrays, given: Sequence[mx.array], options: Sequence[float]
    ) -> tuple[mx.array, mx.array]:
        (q, k, v, a, b, *parameters), (gates, *limits) = given, options
        kind = GATES[int(gates)]
        _, heads, height, width = pool.shape
        state = MatrixState(heads=heads, key_heads=q.shape[1], height=height, width=width)
        vector = a.ndim == 3
        num_rows = v.shape[0]
        _check("pool", pool, pool.shape, mx.float32)
        for name, rows, shape in (
            ("q", q, (num_rows, q.shape[1], width)),
            ("k", k, (num_rows, q.shape[1], width)),
            ("v", v, (num_rows, heads, height)),
            ("a", a, (num_rows, heads, width) if vector else (num_rows, heads)),
            ("b", b, (num_rows, heads)),
        ):
            _check(name, rows, shape)
        inputs = {"q": q, "k": k, "v": v, "a": a, "b": b}
        if len(parameters) != (0 if kind == "ready" else 2):
            raise ValueError(f"gates need A_log and dt_bias unless ready, got {len(parameters)} for {kind}")
        wide_A = False
        if parameters:
            dt_bias, A_log = parameters
            wide_A = A_log.size != heads
            of_row = heads * width if vector else heads
            if dt_bias.size != of_row or A_log.size not in (heads, of_row):
                raise ValueError(
                    f"dt_bias must have {of_row} values (a row of a), and A_log {of_row} or {heads}, got "
                    f"{dt_bias.size} and {A_log.size}"
                )
            inputs |= {"A_log": A_log, "dt_bias": dt_bias, "limits": self._limits(*limits)}
        kernel = self._library.made(
            ("delta", state, kind, vector, wide_A),
            lambda: delta_unit(state, kind, vector_gate=vector, wide_A=wide_A),
        )
        return self._run(kernel, pool, step, inputs, v, (32 * state.simdgroups * state.tiles, heads), state)

    def _ssd(
        self, pool: mx.array, step: SegmentArrays, given: Sequence[mx.array], options: Sequence[float]
    ) -> tuple[mx.array, mx.array]:
        inputs = dict(zip(("x", "B", "C", "dt", "A_log", "dt_bias", "D"), given, strict=True))
        num_rows, num_groups = inputs["x"].shape[0], inputs["B"].shape[1]
        _, heads, height, width = pool.shape
        state = MatrixState(heads=heads, key_heads=num_groups, height=height, width=width)
        _check("pool", pool, pool.shape, mx.float32)
        shapes = {"x": (num_rows, heads, height), "dt": (num_rows, heads)}
        shapes |= dict.fromkeys("BC", (num_rows, num_groups, width))
        for name, array in inputs.items():
            _check(name, array, shapes.get(name, (heads,)))
        inputs["limits"] = self._limits(*options)
        kernel = self._library.made(("ssd", state), lambda: ssd_unit(state))
        grid = (32 * state.simdgroups * state.tiles, heads)
        return self._run(kernel, pool, step, inputs, inputs["x"], grid, state)

    def _causal_conv(
        self, pool: mx.array, step: SegmentArrays, given: Sequence[mx.array], options: Sequence[float]
    ) -> tuple[mx.array, mx.array]:
        inputs = dict(zip(("x", "weight", "bias"), given, strict=False))
        x, silu, bias = inputs["x"], options[0] != 0, "bias" in inputs
        taps, channels = inputs["weight"].shape
        if taps < 2:
            raise ValueError(f"a convolution must have two taps or more for the Metal kernels, got {taps}")
        _check("x", x, (x.shape[0], channels))
        _check("pool", pool, (pool.shape[0], taps - 1, channels))
        if pool.dtype not in (x.dtype, mx.float32):
            raise ValueError(f"inputs must have the pool's dtype {pool.dtype}, got {x.dtype}")
        kernel = self._library.made(
            ("conv", taps, channels, silu, bias), lambda: conv_unit(taps, channels, silu=silu, bias=bias)
        )
        threads = -(-channels // CONV_THREADS) * CONV_THREADS
        return self._run(kernel, pool, step, inputs, x, (threads, 1), None)

    def _run(
        self,
        kernel: Kernel,
        pool: mx.array,
        step: SegmentArrays,
        inputs: dict[str, mx.array],
        like: mx.array,
        grid: tuple[int, int],
        state: MatrixState | None,
    ) -> tuple[mx.array, mx.array]:
        given = {name: wide(array) for name, array in inputs.items()}
        given |= {"pool": pool, "to_pool": pool, "segments": step.segments, "checkpoints": step.checkpoints}
        threads = CONV_THREADS if state is None else 32 * state.simdgroups
        launch = Launch(
            grid=(*grid, step.num_segments), threadgroup=(threads, 1, 1), outputs=((like.shape, like.dtype),)
        )
        (y,) = kernel(given, launch)
        return pool, y

    def _limits(self, low: float, high: float) -> mx.array:
        if (low, high) not in self._numbers:
            self._numbers[low, high] = padded(np.array([low, high], np.float32))
        return self._numbers[low, high]


def _check(name: str, array: mx.array, shape: tuple[int, ...], dtype: mx.Dtype | None = None) -> None:
    if array.shape != shape or (dtype is not None and array.dtype != dtype):
        wanted = "" if dtype is None else f"{dtype} "
        raise ValueError(f"{name} must be {wanted}{list(shape)}, got {array.dtype} {list(array.shape)}")


_STEP = StateSegments.of([1, 9, 3], source=[0, NO_STATE, 2], target=[0, 1, 3], checkpoints=[(4, 4)])
_ROWS, _SLOTS = 13, 5
_WRITTEN = (0, 1, 3, 4)
_KEY_HEADS, _HEADS, _DIM = 2, 4, 64
_LIMIT = 1e-4
"""Largest allowed error relative to the largest value, for float32 sums of 64 products and the GPU's
exponential function."""

Array = NDArray[Any]
Check = Callable[[MetalRecurrences, np.random.Generator], tuple[list[mx.array], list[Array]]]


def recurrent_problem(library: KernelLibrary) -> str | None:
    """Test the recurrent kernels; return one line about the failure, or None if they pass."""
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
                return f"{name}: {what} have error {error:.2g} of the largest value, limit {_LIMIT}"
    return None


def _delta(kernels: MetalRecurrences, rng: np.random.Generator) -> tuple[list[mx.array], list[Array]]:
    q, k = (_normal(rng, _ROWS, _KEY_HEADS, _DIM) / 8 for _ in range(2))
    v, a, b = (_normal(rng, _ROWS, *shape) for shape in ((_HEADS, _DIM), (_HEADS,), (_HEADS,)))
    A_log, dt_bias = _normal(rng, _HEADS), _normal(rng, _HEADS)
    states = _normal(rng, _SLOTS, _HEADS, _DIM, _DIM)
    inputs = [mx.array(x) for x in (q, k, v, a, b, dt_bias, A_log)]
    options = [GATES.index("softplus"), 0.0, 1.0]
    pool = _pool(states)
    _, y = kernels.recurrence("gated_delta", pool, SegmentArrays.of(_STEP), inputs, options)
    g = truth.delta_decay(a, A_log, dt_bias)
    exact = truth.gated_delta(states, _STEP, q, k, v, g, truth.sigmoid(b))
    return _results(pool, y), [exact, states[list(_WRITTEN)]]


def _ssd(kernels: MetalRecurrences, rng: np.random.Generator) -> tuple[list[mx.array], list[Array]]:
    x, dt = _normal(rng, _ROWS, _HEADS, _DIM), _normal(rng, _ROWS, _HEADS)
    B, C = (_normal(rng, _ROWS, _KEY_HEADS, _DIM) for _ in range(2))
    A_log, dt_bias, D = (_normal(rng, _HEADS) for _ in range(3))
    states = _normal(rng, _SLOTS, _HEADS, _DIM, _DIM)
    inputs = [mx.array(part) for part in (x, B, C, dt, A_log, dt_bias, D)]
    pool = _pool(states)
    _, y = kernels.recurrence("ssd", pool, SegmentArrays.of(_STEP), inputs, [0.0, np.inf])
    exact = truth.ssd(states, _STEP, x, B, C, truth.softplus(dt + dt_bias), A_log, D)
    return _results(pool, y), [exact, states[list(_WRITTEN)]]


def _conv(kernels: MetalRecurrences, rng: np.random.Generator) -> tuple[list[mx.array], list[Array]]:
    x, weight, windows = _normal(rng, _ROWS, 80), _normal(rng, 4, 80), _normal(rng, _SLOTS, 3, 80)
    pool = _pool(windows)
    inputs = [mx.array(x), mx.array(weight)]
    _, y = kernels.recurrence("causal_conv", pool, SegmentArrays.of(_STEP), inputs, [1.0])
    exact = truth.causal_conv(windows, _STEP, x, weight, None, silu=True)
    return _results(pool, y), [exact, windows[list(_WRITTEN)]]


def _normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


def _pool(states: Array) -> mx.array:
    pool = mx.array(states)
    mx.eval(pool)
    return pool


def _results(pool: mx.array, y: mx.array) -> list[mx.array]:
    mx.eval(y)  # the kernel writes the pool without MLX knowing
    return [y, pool[mx.array(_WRITTEN)]]
