"""Recurrent layers on the native kernels: those of every device, and the rarer ones that only the CPU has."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from octavo.kernels import _ext
from octavo.kernels.cpu import recurrent
from octavo.kernels.cpu.backend import CpuPrograms
from octavo.kernels.cpu.recurrent import StateArrays

from ..recurrent.kernel_recurrences import FLOATS, Arguments, KernelRecurrences, rows_of
from ..recurrent.recurrences import Advance, Entry, StateCapture
from ..recurrent.segments import StateStep


class NativeRecurrences(KernelRecurrences):
    """``Recurrences`` of the native CPU kernels."""

    def __init__(self) -> None:
        super().__init__(recurrent)
        self._decays: dict[int, tuple[Module, mx.array]] = {}  # c of RG-LRU
        self._functions |= {"recurrent_gla": _gla, "selective_scan": _selective_scan, "_wkv7": _wkv7}

    def zeros(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        return recurrent.zeros(shape, dtype)

    def mark(self, flags: mx.array, arrays: StateArrays, y: mx.array, step: StateStep) -> mx.array:
        del step
        return recurrent.mark_nonfinite(flags, arrays, y)

    def rows_behind(self, window: mx.array, keep: int) -> mx.array:
        return _ext.rows_behind(window, keep)

    def state_capture(self) -> StateCapture:
        return StateCapture(CpuPrograms(), lambda arrays: StateArrays(*arrays))

    def child(self, module: Module, rows: mx.array) -> Advance | None:
        if type(module).__name__ == "RGLRU":
            return self._rg_lru(module, rows.squeeze(0))
        return super().child(module, rows)

    def _rg_lru(self, module: Any, x: mx.array) -> Advance | None:
        """recurrent_gemma's recurrence, its gates computed in front of the kernel."""
        if x.dtype not in FLOATS or mx.result_type(x, module.input_gate_weight) != x.dtype:
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


def _gla(given: Arguments) -> Advance | None:
    q, k, v = (x.swapaxes(0, 1) for x in rows_of(given, "q", "k", "v"))
    decay = given["g"].reshape(-1)
    if k.shape[-1] % 2 or v.shape[-1] % recurrent.KEY_DIM_MULTIPLE or decay.size != q.shape[1]:
        return None

    def run(pool: mx.array, step: StateArrays) -> tuple[mx.array, mx.array]:
        return recurrent.lightning(pool, step, q, k, v, log_decay=decay, scale=given["scale"])

    state = (q.shape[1], k.shape[-1], v.shape[-1])
    return Advance(Entry(state, mx.float32), run, lambda y: y.swapaxes(0, 1)[None].astype(q.dtype))


def _selective_scan(given: Arguments) -> Advance | None:
    x, d, B, C = rows_of(given, "x", "d", "B", "C")
    A, D = given["A"], given["D"]
    x = x.astype(mx.result_type(x, A))  # the dtype of mlx-lm's y
    if B.shape[-1] % recurrent.KEY_DIM_MULTIPLE or any(rows.dtype not in FLOATS for rows in (x, d, B, C)):
        return None

    def run(pool: mx.array, step: StateArrays) -> tuple[mx.array, mx.array]:
        return recurrent.selective_scan(pool, step, x, d, B, C, A=A, D=D)

    return Advance(Entry((x.shape[1], B.shape[-1]), mx.float32), run, lambda y: y[None])


def _wkv7(given: Arguments) -> Advance | None:
    rows = rows_of(given, "r", "w", "k", "v", "a", "b")
    _, heads, size = rows[0].shape
    if size % recurrent.KEY_DIM_MULTIPLE or any(x.dtype not in FLOATS for x in rows):
        return None

    def run(pool: mx.array, step: StateArrays) -> tuple[mx.array, mx.array]:
        return recurrent.wkv7(pool, step, *rows)

    return Advance(Entry((heads, size, size), mx.float32), run, lambda y: y[None])
