"""Kernels that replace mlx-lm's recurrence functions and use the slots of a state pool.

A function takes the arguments of mlx-lm's function, with all rows of a step as ``[1, T, ..]``. It returns
None if no kernel fits. States have mlx-lm's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from octavo.kernels.interface import AttentionBackend
from octavo.kernels.recurrent_kernels import GATES, RecurrentKernels

from .entries import EntrySpec

Arguments = dict[str, Any]

FLOATS = (mx.float32, mx.bfloat16, mx.float16)

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
"""Argument names of mlx-lm's functions, in order."""


@dataclass(frozen=True, slots=True)
class Advance:
    entry: EntrySpec
    run: Callable[[mx.array, Any], tuple[mx.array, mx.array]]
    finish: Callable[[mx.array], mx.array]


class Recurrences:
    def __init__(self, kernels: RecurrentKernels | None) -> None:
        self._kernels = kernels
        self._arrays: dict[int, tuple[Module, mx.array]] = {}
        self._functions: dict[str, Callable[[Arguments], Advance | None]] = {
            "gated_delta_update": self._gated_delta,
            "ssm_update": self._ssm,
            "recurrent_gla": self._gla,
            "selective_scan": self._selective_scan,
            "_wkv7": self._wkv7,
        }

    @property
    def kernels(self) -> RecurrentKernels:
        assert self._kernels is not None, "there are no kernels"
        return self._kernels

    def zeros(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        return mx.zeros(shape, dtype) if self._kernels is None else self._kernels.zeros(shape, dtype)

    def function(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Advance | None:
        kernel = self._functions.get(name)
        if kernel is None or self._kernels is None:
            return None
        named: Arguments = dict(zip(_NAMES[name], args, strict=False)) | kwargs
        if named.get("mask") is not None or named.get("lengths") is not None:
            return None
        return kernel(named)

    def child(self, module: Module, rows: mx.array) -> Advance | None:
        if self._kernels is None:
            return None
        kind = type(module).__name__
        if kind == "RGLRU" and self._kernels.takes("rg_lru", rows.shape[-1]):
            return self._rg_lru(module, rows.squeeze(0), self._array_of(module, _lru_decay))
        return self.conv(module, rows.squeeze(0)) if kind == "Conv1d" else None

    def conv_behind(self, module: Any, window: mx.array, keep: int) -> Advance | None:
        return None if self._kernels is None else self.conv(module, self._kernels.rows_behind(window, keep))

    def conv(self, module: Any, rows: mx.array) -> Advance | None:
        weight = self._array_of(module, _turned_weight)
        return self.taps(rows, weight, module.bias if "bias" in module else None)

    def taps(self, rows: mx.array, weight: mx.array, bias: mx.array | None = None) -> Advance | None:
        """Return the kernel call for a causal convolution of rows [T, C] with weights [K, C]."""
        if self._kernels is None or rows.dtype not in FLOATS or mx.result_type(rows, weight) != rows.dtype:
            return None
        inputs = [rows, weight] if bias is None else [rows, weight, bias]
        entry = EntrySpec((weight.shape[0] - 1, weight.shape[1]), rows.dtype)
        return self._advance("causal_conv", entry, inputs, [0.0])

    def _array_of(self, module: Module, make: Callable[[Any], mx.array]) -> mx.array:
        known = self._arrays.get(id(module))
        if known is None:
            known = self._arrays[id(module)] = (module, make(module))
            mx.eval(known[1])
        return known[1]

    def _gated_delta(self, given: Arguments) -> Advance | None:
        q, k, v, a, b = _rows_of(given, "q", "k", "v", "a", "b")
        if not self.kernels.takes("gated_delta", k.shape[-1]) or k.shape[1] == 0 or v.shape[1] % k.shape[1]:
            return None
        bound = given.get("lower_bound")
        gates = float(GATES.index("softplus" if bound is None else "bounded"))
        return self._advance(
            "gated_delta",
            EntrySpec((*v.shape[1:], k.shape[-1]), mx.float32),
            [q, k, v, a, b, given["dt_bias"], given["A_log"]],
            [gates, bound or 0.0, 2.0 if given.get("allow_neg_eigval") else 1.0],
            lambda y: y[None].astype(q.dtype),
        )

    def _ssm(self, given: Arguments) -> Advance | None:
        x, B, C, dt = _rows_of(given, "hidden_states", "B", "C", "dt")
        if not self.kernels.takes("ssd", B.shape[-1]) or x.shape[1] % B.shape[1]:
            return None
        x = x.astype(mx.result_type(x, given["D"]))
        inputs = [x, B, C, dt, given["A_log"], given["dt_bias"], given["D"]]
        limits = [*map(float, given.get("time_step_limit") or (0.001, 100.0))]
        return self._advance("ssd", EntrySpec((*x.shape[1:], B.shape[-1]), mx.float32), inputs, limits)

    def _rg_lru(self, module: Any, x: mx.array, c: mx.array) -> Advance | None:
        if x.dtype not in FLOATS or mx.result_type(x, module.input_gate_weight) != x.dtype:
            return None
        blocks = x.reshape(x.shape[0], module.num_heads, module.head_dim).swapaxes(0, 1)

        def gate(weight: mx.array, bias: mx.array) -> mx.array:
            return ((blocks @ weight).swapaxes(0, 1) + bias).reshape(x.shape)

        input_gate = gate(module.input_gate_weight, module.input_gate_bias)
        a_gate = gate(module.recurrent_gate_weight, module.recurrent_gate_bias)
        return self._advance("rg_lru", EntrySpec((x.shape[1],), mx.float32), [x, input_gate, a_gate, c])

    def _gla(self, given: Arguments) -> Advance | None:
        q, k, v = (x.swapaxes(0, 1) for x in _rows_of(given, "q", "k", "v"))
        decay = given["g"].reshape(-1)
        takes = self.kernels.takes("lightning", v.shape[-1])
        if not takes or k.shape[-1] % 2 or decay.size != q.shape[1]:
            return None
        return self._advance(
            "lightning",
            EntrySpec((q.shape[1], k.shape[-1], v.shape[-1]), mx.float32),
            [q, k, v, decay],
            [given["scale"]],
            lambda y: y.swapaxes(0, 1)[None].astype(q.dtype),
        )

    def _selective_scan(self, given: Arguments) -> Advance | None:
        x, d, B, C = _rows_of(given, "x", "d", "B", "C")
        A, D = given["A"], given["D"]
        x = x.astype(mx.result_type(x, A))
        takes = self.kernels.takes("selective_scan", B.shape[-1])
        if not takes or any(r.dtype not in FLOATS for r in (x, d, B, C)):
            return None
        entry = EntrySpec((x.shape[1], B.shape[-1]), mx.float32)
        return self._advance("selective_scan", entry, [x, d, B, C, A, D])

    def _wkv7(self, given: Arguments) -> Advance | None:
        rows = _rows_of(given, "r", "w", "k", "v", "a", "b")
        _, heads, size = rows[0].shape
        if not self.kernels.takes("wkv7", size) or any(x.dtype not in FLOATS for x in rows):
            return None
        return self._advance("wkv7", EntrySpec((heads, size, size), mx.float32), rows)

    def _advance(
        self,
        name: str,
        entry: EntrySpec,
        inputs: list[mx.array],
        options: Sequence[float] = (),
        finish: Callable[[mx.array], mx.array] = lambda y: y[None],
    ) -> Advance:
        def run(pool: mx.array, step: Any) -> tuple[mx.array, mx.array]:
            return self.kernels.recurrence(name, pool, step, inputs, options)

        return Advance(entry, run, finish)


def recurrences_of(backend: AttentionBackend) -> Recurrences | None:
    kernels = backend.recurrent_kernels
    return None if kernels is None else Recurrences(kernels)


def _rows_of(given: Arguments, *names: str) -> list[mx.array]:
    return [given[name].squeeze(0) for name in names]


def _turned_weight(conv: Any) -> mx.array:
    return mx.contiguous(conv.weight[..., 0].T)


def _lru_decay(module: Any) -> mx.array:
    return -8.0 * mx.logaddexp(module.recurrent_param.astype(mx.float32), 0)
