"""Recurrent layers on the native kernels: mlx-lm's cut points, called with all rows of a step at once.

Each function takes the arguments of mlx-lm's own, rows as ``[1, T, ..]``, and says what to run on the pool of
its state, or None where no kernel fits: mlx-lm's operations are used then. States have mlx-lm's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from octavo.kernels.cpu import recurrent
from octavo.kernels.cpu.backend import CpuPrograms
from octavo.kernels.cpu.recurrent import DeltaGates, SsdParameters, StateArrays
from octavo.kernels.state_segments import StateSegments

from ..recurrent.recurrences import Advance, Entry

Arguments = dict[str, Any]

_NAMES = {
    "gated_delta_update": ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state", "mask"),
    "ssm_update": (
        "hidden_states", "A_log", "B", "C", "D", "dt", "dt_bias", "state", "time_step_limit", "mask",
        "lengths",
    ),
    "recurrent_gla": ("q", "k", "v", "g", "scale", "h"),
    "selective_scan": ("x", "d", "B", "C", "A", "D", "state"),
    "_wkv7": ("r", "w", "k", "v", "a", "b", "state"),
}  # fmt: skip
"""Arguments of mlx-lm's functions, in order."""

_FLOATS = (mx.float32, mx.bfloat16, mx.float16)


class NativeRecurrences:
    """``Recurrences`` of the native CPU kernels."""

    def __init__(self) -> None:
        self._taps: dict[int, tuple[Module, mx.array]] = {}  # of convolutions, as the kernel reads them
        self._decays: dict[int, tuple[Module, mx.array]] = {}  # c of RG-LRU

    def arrays(self, segments: StateSegments) -> StateArrays:
        return StateArrays.of(segments)

    def bind(self, arrays: Sequence[mx.array]) -> StateArrays:
        return StateArrays(*arrays)

    def mark(self, flags: mx.array, arrays: StateArrays, y: mx.array) -> mx.array:
        return recurrent.mark_nonfinite(flags, arrays, y)

    def programs(self) -> CpuPrograms:
        return CpuPrograms()

    def function(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Advance | None:
        kernel = _FUNCTIONS.get(name)
        if kernel is None:
            return None
        named: Arguments = dict(zip(_NAMES[name], args, strict=False)) | kwargs
        if named.get("mask") is not None or named.get("lengths") is not None:
            return None
        return kernel(named)

    def child(self, module: Module, rows: mx.array) -> Advance | None:
        kind = type(module).__name__
        if kind == "RGLRU":
            return self._rg_lru(module, rows[0])
        return self.conv(module, rows[0]) if kind == "Conv1d" else None

    def _rg_lru(self, module: Any, x: mx.array) -> Advance | None:
        """recurrent_gemma's recurrence, its gates computed in front of the kernel."""
        if x.dtype not in _FLOATS or mx.result_type(x, module.input_gate_weight) != x.dtype:
            return None
        blocks = x.reshape(x.shape[0], module.num_heads, module.head_dim).swapaxes(0, 1)

        def gate(weight: mx.array, bias: mx.array) -> mx.array:
            return ((blocks @ weight).swapaxes(0, 1) + bias).reshape(x.shape)

        input_gate = gate(module.input_gate_weight, module.input_gate_bias)
        a_gate = gate(module.recurrent_gate_weight, module.recurrent_gate_bias)
        c = self._decay(module)

        def run(pool: mx.array, step: StateArrays) -> tuple[mx.array, mx.array]:
            return recurrent.rg_lru(pool, step, x, input_gate, a_gate, c=c)

        return Advance(Entry((x.shape[1],), mx.float32), run, lambda y: y[None])

    def _decay(self, module: Any) -> mx.array:
        """[W], -8 softplus of the layer's parameter, made once."""
        known = self._decays.get(id(module))
        if known is None:
            decay = -8.0 * mx.logaddexp(module.recurrent_param.astype(mx.float32), 0)
            mx.eval(decay)
            known = self._decays[id(module)] = (module, decay)
        return known[1]

    def conv(self, module: Any, rows: mx.array) -> Advance | None:
        """A depthwise convolution over rows [T, C]."""
        if rows.dtype not in _FLOATS or mx.result_type(rows, module.weight) != rows.dtype:
            return None
        weight = self._weight(module)
        bias = module.bias if "bias" in module else None

        def run(pool: mx.array, step: StateArrays) -> tuple[mx.array, mx.array]:
            return recurrent.causal_conv(pool, step, rows, weight, bias)

        return Advance(Entry((weight.shape[0] - 1, weight.shape[1]), rows.dtype), run, lambda y: y[None])

    def _weight(self, module: Any) -> mx.array:
        """[K, C], turned once."""
        known = self._taps.get(id(module))
        if known is None:
            weight = mx.contiguous(module.weight[..., 0].T)
            mx.eval(weight)
            known = self._taps[id(module)] = (module, weight)
        return known[1]


def _gated_delta(given: Arguments) -> Advance | None:
    q, k, v, a, b = (given[name][0] for name in ("q", "k", "v", "a", "b"))
    if not recurrent.takes_gated_delta(k.shape[-1]) or k.shape[1] == 0 or v.shape[1] % k.shape[1]:
        return None
    bound = given.get("lower_bound")
    gates = DeltaGates(
        kind="softplus" if bound is None else "bounded",
        A_log=given["A_log"],
        dt_bias=given["dt_bias"],
        lower_bound=bound or 0.0,
        beta_scale=2.0 if given.get("allow_neg_eigval") else 1.0,
    )

    def run(pool: mx.array, step: StateArrays) -> tuple[mx.array, mx.array]:
        return recurrent.gated_delta(pool, step, q, k, v, a, b, gates=gates)

    state = (*v.shape[1:], k.shape[-1])
    return Advance(Entry(state, mx.float32), run, lambda y: y[None].astype(q.dtype))


def _ssm(given: Arguments) -> Advance | None:
    x, B, C, dt = (given[name][0] for name in ("hidden_states", "B", "C", "dt"))
    if B.shape[-1] % recurrent.KEY_DIM_MULTIPLE or x.shape[1] % B.shape[1]:
        return None
    x = x.astype(mx.result_type(x, given["D"]))  # the dtype of mlx-lm's y
    lowest, highest = given.get("time_step_limit") or (0.001, 100.0)
    parameters = SsdParameters(
        A_log=given["A_log"],
        dt_bias=given["dt_bias"],
        D=given["D"],
        lowest=float(lowest),
        highest=float(highest),
    )

    def run(pool: mx.array, step: StateArrays) -> tuple[mx.array, mx.array]:
        return recurrent.ssd(pool, step, x, B, C, dt, parameters=parameters)

    return Advance(Entry((*x.shape[1:], B.shape[-1]), mx.float32), run, lambda y: y[None])


def _gla(given: Arguments) -> Advance | None:
    q, k, v = (given[name][0].swapaxes(0, 1) for name in ("q", "k", "v"))
    decay = given["g"].reshape(-1)
    if k.shape[-1] % 2 or v.shape[-1] % recurrent.KEY_DIM_MULTIPLE or decay.size != q.shape[1]:
        return None

    def run(pool: mx.array, step: StateArrays) -> tuple[mx.array, mx.array]:
        return recurrent.lightning(pool, step, q, k, v, log_decay=decay, scale=given["scale"])

    state = (q.shape[1], k.shape[-1], v.shape[-1])
    return Advance(Entry(state, mx.float32), run, lambda y: y.swapaxes(0, 1)[None].astype(q.dtype))


def _selective_scan(given: Arguments) -> Advance | None:
    x, d, B, C = (given[name][0] for name in ("x", "d", "B", "C"))
    A, D = given["A"], given["D"]
    x = x.astype(mx.result_type(x, A))  # the dtype of mlx-lm's y
    if B.shape[-1] % recurrent.KEY_DIM_MULTIPLE or any(rows.dtype not in _FLOATS for rows in (x, d, B, C)):
        return None

    def run(pool: mx.array, step: StateArrays) -> tuple[mx.array, mx.array]:
        return recurrent.selective_scan(pool, step, x, d, B, C, A=A, D=D)

    return Advance(Entry((x.shape[1], B.shape[-1]), mx.float32), run, lambda y: y[None])


def _wkv7(given: Arguments) -> Advance | None:
    rows = [given[name][0] for name in ("r", "w", "k", "v", "a", "b")]
    _, heads, size = rows[0].shape
    if size % recurrent.KEY_DIM_MULTIPLE or any(x.dtype not in _FLOATS for x in rows):
        return None

    def run(pool: mx.array, step: StateArrays) -> tuple[mx.array, mx.array]:
        return recurrent.wkv7(pool, step, *rows)

    return Advance(Entry((heads, size, size), mx.float32), run, lambda y: y[None])


_FUNCTIONS: dict[str, Callable[[Arguments], Advance | None]] = {
    "gated_delta_update": _gated_delta,
    "ssm_update": _ssm,
    "recurrent_gla": _gla,
    "selective_scan": _selective_scan,
    "_wkv7": _wkv7,
}
