"""Recurrences of every kind on small random sequences, each with a kernel and a NumPy definition.

``kernels`` has the functions of ``RecurrentKernels``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from octavo.kernels.recurrent_kernels import GATES
from octavo.kernels.reference import recurrent as truth
from octavo.kernels.state_segments import NO_STATE, StateSegments

Array = NDArray[Any]
Kernel = Callable[..., tuple[mx.array, mx.array]]
LENGTH = 40  # more rows than a kernel computes at once
NUM_SLOTS = 6
SLOT = 2  # slot of the checked sequence


@dataclass(frozen=True)
class Case:
    """A recurrence and its definition.

    rows:   [T, ...] of one sequence
    arrays: returns arguments of ``kernel`` for a step
    truth:  takes states [N, ...], the step and rows in float64."""

    name: str
    state: tuple[int, ...]
    pool_dtype: mx.Dtype
    rows: tuple[mx.array, ...]
    arrays: Callable[[StateSegments], Any]
    kernel: Kernel
    truth: Callable[..., Array]

    @property
    def length(self) -> int:
        return int(self.rows[0].shape[0])

    def pool(self) -> mx.array:
        """Return slots with contents of earlier owners, which must not be read."""
        return mx.full((NUM_SLOTS, *self.state), float("nan"), self.pool_dtype)


def bits(x: mx.array) -> Array:
    return np.array(x.view(mx.uint16) if x.itemsize == 2 else x.view(mx.uint32))


def floats(x: mx.array) -> Array:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def call(
    case: Case, pool: mx.array, step: StateSegments, rows: Sequence[mx.array]
) -> tuple[mx.array, mx.array]:
    step.check(NUM_SLOTS)
    pool, y = case.kernel(pool, case.arrays(step), *rows)
    mx.eval(pool, y)
    return pool, y


def run(case: Case, cuts: Sequence[int], *, mates: bool = False) -> tuple[Array, Array]:
    """Compute a sequence in steps of ``cuts`` rows; return the bits of y and of the last state."""
    pool, outputs, at = case.pool(), [], 0
    for size in cuts:
        part = [x[at : at + size] for x in case.rows]
        lengths, source, target = [size], [SLOT if at else NO_STATE], [SLOT]
        if mates:
            part = [mx.concatenate([x[3:5], y, x[7:10]]) for x, y in zip(case.rows, part, strict=True)]
            lengths, source = [2, size, 3, 0], [NO_STATE, *source, 1 if at else NO_STATE, NO_STATE]
            target = [4, SLOT, 1, 0]
        pool, y = call(case, pool, StateSegments.of(lengths, source=source, target=target), part)
        outputs.append(bits(y)[2 if mates else 0 :][:size])
        at += size
    assert at == case.length
    return np.concatenate(outputs), bits(pool)[SLOT]


def gated_delta(
    kernels: Any,
    pool: mx.array,
    step: Any,
    *rows: mx.array,
    kind: str = "ready",
    A_log: Any = None,
    dt_bias: Any = None,
    lower_bound: float = 0.0,
    beta_scale: float = 1.0,
) -> Any:
    parameters = [x for x in (dt_bias, A_log) if x is not None]
    options = [GATES.index(kind), lower_bound, beta_scale]
    return kernels.recurrence("gated_delta", pool, step, [*rows, *parameters], options)


def ssd(
    kernels: Any,
    pool: mx.array,
    step: Any,
    *rows: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    D: mx.array,
    limits: tuple[float, float] = (0.0, np.inf),
) -> Any:
    return kernels.recurrence("ssd", pool, step, [*rows, A_log, dt_bias, D], limits)


def causal_conv(
    kernels: Any,
    pool: mx.array,
    step: Any,
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    *,
    silu: bool = False,
) -> Any:
    inputs = [x, weight] if bias is None else [x, weight, bias]
    return kernels.recurrence("causal_conv", pool, step, inputs, [float(silu)])


def delta_cases(kernels: Any) -> Iterator[Case]:
    rng = np.random.default_rng(1)
    shapes = ((1, 1, 16, 16), (2, 4, 32, 24), (1, 3, 64, 7), (2, 2, 128, 40))
    for vector in (False, True):
        for index, (Hk, Hv, Dk, Dv) in enumerate(shapes):
            dtype = (mx.float32, mx.bfloat16)[index % 2]
            q, k = (_unit(rng.standard_normal((LENGTH, Hk, Dk))) for _ in range(2))
            v = rng.standard_normal((LENGTH, Hv, Dv))
            g = rng.uniform(0.5, 1, (LENGTH, Hv, Dk) if vector else (LENGTH, Hv))
            g[5] = 1e-30  # forgets all earlier rows
            rows = [_array(x, dtype) for x in (q, k, v)]
            rows += [_array(x, mx.float32) for x in (g, rng.uniform(0, 1, (LENGTH, Hv)))]
            gate = "vector" if vector else "scalar"
            name = f"gated delta, {gate} gate, {Hk} and {Hv} heads, {Dk} x {Dv}, {dtype}"
            yield Case(
                name,
                (Hv, Dv, Dk),
                mx.float32,
                tuple(rows),
                kernels.arrays,
                functools.partial(gated_delta, kernels),
                truth.gated_delta,
            )


def gate_cases(kernels: Any) -> Iterator[Case]:
    rng = np.random.default_rng(2)
    Hk, Hv, D = 2, 4, 32
    for kind in ("softplus", "bounded"):
        for vector in (False, True):
            q, k = (_unit(rng.standard_normal((LENGTH, Hk, D))) for _ in range(2))
            a = 3 * rng.standard_normal((LENGTH, Hv, D) if vector else (LENGTH, Hv))
            a[7] = -100.0
            a[8] = 100.0
            inputs = (q, k, rng.standard_normal((LENGTH, Hv, D)), a, 2 * rng.standard_normal((LENGTH, Hv)))
            rows = tuple(_array(x, mx.float32) for x in inputs)
            A_log, dt_bias = rng.uniform(-1, 1, Hv), rng.standard_normal(a.shape[1:])
            yield _gate_case(kernels, kind, vector, rows, A_log, dt_bias)


def _gate_case(
    kernels: Any, kind: Any, vector: bool, rows: tuple[mx.array, ...], A_log: Array, dt_bias: Array
) -> Case:
    A, bias = _array(A_log, mx.float32), _array(dt_bias, mx.float32)
    if vector:
        A = A.reshape(-1, 1)  # the shape in Kimi's layers
    bound = -5.0 if kind == "bounded" else None
    gates = {"kind": kind, "A_log": A, "dt_bias": bias, "lower_bound": bound or 0.0, "beta_scale": 2.0}

    def kernel(pool: mx.array, step: Any, *parts: mx.array) -> Any:
        return gated_delta(kernels, pool, step, *parts, **gates)

    def reference(
        states: Array, step: StateSegments, q: Array, k: Array, v: Array, a: Array, b: Array
    ) -> Array:
        g = truth.delta_decay(a, floats(A).ravel(), floats(bias), bound)
        return truth.gated_delta(states, step, q, k, v, g, 2 * truth.sigmoid(b))

    gate = "vector" if vector else "scalar"
    state = (rows[2].shape[1], rows[2].shape[2], rows[0].shape[2])
    return Case(
        f"gated delta, {kind} {gate} gate", state, mx.float32, rows, kernels.arrays, kernel, reference
    )


def conv_cases(kernels: Any) -> Iterator[Case]:
    rng = np.random.default_rng(3)
    for taps, channels, dtype, pool_dtype, silu, bias in (
        (4, 48, mx.float32, mx.float32, True, True),
        (4, 300, mx.bfloat16, mx.bfloat16, True, False),
        (3, 5, mx.bfloat16, mx.float32, False, True),
        (2, 17, mx.float16, mx.float16, False, False),
        (7, 33, mx.bfloat16, mx.bfloat16, True, True),
        (7, 64, mx.bfloat16, mx.bfloat16, True, True),
    ):
        weight = _array(rng.standard_normal((taps, channels)), dtype)
        offset = _array(rng.standard_normal(channels), dtype) if bias else None
        x = _array(rng.standard_normal((LENGTH, channels)), dtype)
        yield _conv_case(kernels, x, weight, offset, silu=silu, pool_dtype=pool_dtype)


def _conv_case(
    kernels: Any, x: mx.array, weight: mx.array, bias: mx.array | None, *, silu: bool, pool_dtype: mx.Dtype
) -> Case:
    def kernel(pool: mx.array, step: Any, x: mx.array) -> Any:
        return causal_conv(kernels, pool, step, x, weight, bias, silu=silu)

    def reference(windows: Array, step: StateSegments, x: Array) -> Array:
        offset = None if bias is None else floats(bias)
        return truth.causal_conv(windows, step, x, floats(weight), offset, silu=silu)

    taps, channels = weight.shape
    name = f"convolution, {taps} taps, {channels} channels, {x.dtype} in {pool_dtype}, silu {silu}"
    return Case(name, (taps - 1, channels), pool_dtype, (x,), kernels.arrays, kernel, reference)


def ssd_cases(kernels: Any) -> Iterator[Case]:
    rng = np.random.default_rng(4)
    for H, G, Dh, Ds, dtype in (
        (1, 1, 8, 16, mx.float32),
        (4, 2, 22, 64, mx.bfloat16),
        (3, 1, 33, 128, mx.float32),
    ):
        parts = ((LENGTH, H, Dh), (LENGTH, G, Ds), (LENGTH, G, Ds), (LENGTH, H))
        rows = tuple(_array(rng.standard_normal(shape), dtype) for shape in parts)
        A_log, dt_bias, D = (_array(rng.uniform(-1, 1, H), mx.float32) for _ in range(3))
        parameters = {"A_log": A_log, "dt_bias": dt_bias, "D": D}
        yield _ssd_case(kernels, f"{H} heads of {G}, {Dh} x {Ds}, {dtype}", rows, parameters)


def _ssd_case(kernels: Any, name: str, rows: tuple[mx.array, ...], parameters: dict[str, mx.array]) -> Case:
    def kernel(pool: mx.array, step: Any, *parts: mx.array) -> Any:
        return ssd(kernels, pool, step, *parts, **parameters, limits=(0.2, 1.5))

    def reference(states: Array, step: StateSegments, x: Array, B: Array, C: Array, dt: Array) -> Array:
        A_log, dt_bias, D = map(floats, parameters.values())
        d = np.clip(truth.softplus(dt + dt_bias), 0.2, 1.5)
        return truth.ssd(states, step, x, B, C, d, A_log, D)

    state = (*rows[0].shape[1:], rows[1].shape[2])
    return Case(f"SSD, {name}", state, mx.float32, rows, kernels.arrays, kernel, reference)


def lightning_cases(kernels: Any) -> Iterator[Case]:
    rng = np.random.default_rng(5)
    for H, Dk, Dv, dtype in ((1, 16, 16, mx.float32), (3, 32, 48, mx.bfloat16), (2, 6, 64, mx.float32)):
        rows = tuple(_array(rng.standard_normal((LENGTH, H, D)), dtype) for D in (Dk, Dk, Dv))
        slope = _array(-rng.uniform(0.01, 2, H), mx.float32)

        def kernel(pool: mx.array, step: Any, *parts: mx.array, slope: mx.array = slope) -> Any:
            return kernels.recurrence("lightning", pool, step, [*parts, slope], [0.25])

        def reference(states: Array, step: StateSegments, *parts: Array, slope: mx.array = slope) -> Array:
            return truth.lightning(states, step, *parts, log_decay=floats(slope), scale=0.25)

        name = f"lightning attention, {H} heads, {Dk} x {Dv}, {dtype}"
        yield Case(name, (H, Dk, Dv), mx.float32, rows, kernels.arrays, kernel, reference)


def scan_cases(kernels: Any) -> Iterator[Case]:
    rng = np.random.default_rng(6)
    for W, Ds, dtype in ((7, 16, mx.float32), (70, 16, mx.bfloat16), (66, 48, mx.float32)):
        shapes = ((LENGTH, W), (LENGTH, W), (LENGTH, Ds), (LENGTH, Ds))
        x, d, B, C = (_array(rng.standard_normal(shape), dtype) for shape in shapes)
        rows = (x, mx.abs(d), B, C)
        A, D = _array(-rng.uniform(0.1, 4, (W, Ds)), mx.float32), _array(rng.standard_normal(W), mx.float32)

        def kernel(pool: mx.array, step: Any, *parts: mx.array, A: mx.array = A, D: mx.array = D) -> Any:
            return kernels.recurrence("selective_scan", pool, step, [*parts, A, D])

        def reference(
            states: Array, step: StateSegments, *parts: Array, A: mx.array = A, D: mx.array = D
        ) -> Array:
            return truth.selective_scan(states, step, *parts, A=floats(A), D=floats(D))

        yield Case(
            f"selective scan, {W} x {Ds}, {dtype}",
            (W, Ds),
            mx.float32,
            rows,
            kernels.arrays,
            kernel,
            reference,
        )


def lru_cases(kernels: Any) -> Iterator[Case]:
    rng = np.random.default_rng(7)
    for W, dtype in ((5, mx.float32), (300, mx.bfloat16)):
        rows = tuple(_array(rng.standard_normal((LENGTH, W)), dtype) for _ in range(3))
        c = _array(-rng.uniform(0.5, 8, W), mx.float32)

        def kernel(pool: mx.array, step: Any, *parts: mx.array, c: mx.array = c) -> Any:
            return kernels.recurrence("rg_lru", pool, step, [*parts, c])

        def reference(states: Array, step: StateSegments, *parts: Array, c: mx.array = c) -> Array:
            return truth.rg_lru(states, step, *parts, c=floats(c))

        yield Case(
            f"RG-LRU, {W} channels, {dtype}", (W,), mx.float32, rows, kernels.arrays, kernel, reference
        )


def wkv_cases(kernels: Any) -> Iterator[Case]:
    rng = np.random.default_rng(8)
    for H, D, dtype in ((1, 16, mx.float32), (2, 64, mx.bfloat16), (3, 48, mx.float32)):
        r, k, v = (rng.standard_normal((LENGTH, H, D)) for _ in range(3))
        key = _unit(rng.standard_normal((LENGTH, H, D)))
        w, rate = rng.uniform(0.5, 1, (LENGTH, H, D)), rng.uniform(0, 1, (LENGTH, H, D))
        rows = tuple(_array(x, dtype) for x in (r, w, k, v, -key, key * rate))
        yield Case(
            f"RWKV-7, {H} heads of {D}, {dtype}",
            (H, D, D),
            mx.float32,
            rows,
            kernels.arrays,
            lambda pool, step, *parts: kernels.recurrence("wkv7", pool, step, list(parts)),
            truth.wkv7,
        )


CASES: tuple[Callable[[Any], Iterator[Case]], ...] = (
    delta_cases, gate_cases, conv_cases, ssd_cases, lightning_cases, scan_cases, lru_cases, wkv_cases,
)  # fmt: skip


def all_cases(kernels: Any) -> Iterator[Case]:
    for cases in CASES:
        yield from cases(kernels)


def _unit(x: Array) -> Array:
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def _array(x: Array, dtype: mx.Dtype) -> mx.array:
    return mx.array(x.astype(np.float32)).astype(dtype)
