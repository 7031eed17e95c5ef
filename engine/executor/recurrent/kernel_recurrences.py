"""Recurrent layers on kernels over slots: mlx-lm's cut points, called with all rows of a step at once.

Each function takes the arguments of mlx-lm's own, rows as ``[1, T, ..]``, and says what to run on the pool of
its state, or None where no kernel fits: mlx-lm's operations are used then. States have mlx-lm's layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from octavo.kernels.recurrent_kernels import DeltaGates, RecurrentKernels, SsdParameters
from octavo.kernels.state_segments import StateSegments

from .recurrences import Advance, Entry, StateCapture
from .segments import StateStep

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
"""Arguments of mlx-lm's functions, in order."""


def rows_of(given: Arguments, *names: str) -> list[mx.array]:
    """Arguments [1, T, ..] as [T, ..]: views, which an index would copy."""
    return [given[name].squeeze(0) for name in names]


class KernelRecurrences:
    """``Recurrences`` of the kernels that every device with kernels has."""

    def __init__(self, kernels: RecurrentKernels) -> None:
        self._kernels = kernels
        self._taps: dict[int, tuple[Module, mx.array]] = {}  # of convolutions, as the kernel reads them
        self._functions: dict[str, Callable[[Arguments], Advance | None]] = {
            "gated_delta_update": self._gated_delta,
            "ssm_update": self._ssm,
        }

    def arrays(self, segments: StateSegments) -> Any:
        return self._kernels.arrays(segments)

    def zeros(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        return mx.zeros(shape, dtype)

    def mark(self, flags: mx.array, arrays: Any, y: mx.array, step: StateStep) -> mx.array:
        del arrays
        rows = step.last_row_ids
        last = y if rows is None else y[rows]
        finite = mx.isfinite(last.reshape(last.shape[0], -1).astype(mx.float32).sum(axis=1))
        bad = mx.logical_not(finite).astype(mx.int32)
        return flags + bad if rows is None else flags.at[rows].add(bad)

    def state_capture(self) -> StateCapture | None:
        return None

    def function(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Advance | None:
        kernel = self._functions.get(name)
        if kernel is None:
            return None
        named: Arguments = dict(zip(_NAMES[name], args, strict=False)) | kwargs
        if named.get("mask") is not None or named.get("lengths") is not None:
            return None
        return kernel(named)

    def child(self, module: Module, rows: mx.array) -> Advance | None:
        return self.conv(module, rows.squeeze(0)) if type(module).__name__ == "Conv1d" else None

    def conv(self, module: Any, rows: mx.array) -> Advance | None:
        """A depthwise convolution over rows [T, C]."""
        return self.taps(rows, self._weight(module), module.bias if "bias" in module else None)

    def taps(self, rows: mx.array, weight: mx.array, bias: mx.array | None = None) -> Advance | None:
        if rows.dtype not in FLOATS or mx.result_type(rows, weight) != rows.dtype:
            return None

        def run(pool: mx.array, step: Any) -> tuple[mx.array, mx.array]:
            return self._kernels.causal_conv(pool, step, rows, weight, bias)

        return Advance(Entry((weight.shape[0] - 1, weight.shape[1]), rows.dtype), run, lambda y: y[None])

    def rows_behind(self, window: mx.array, keep: int) -> mx.array:
        return window[0, keep:]

    def _weight(self, module: Any) -> mx.array:
        """[K, C], turned once."""
        known = self._taps.get(id(module))
        if known is None:
            weight = mx.contiguous(module.weight[..., 0].T)
            mx.eval(weight)
            known = self._taps[id(module)] = (module, weight)
        return known[1]

    def _gated_delta(self, given: Arguments) -> Advance | None:
        q, k, v, a, b = rows_of(given, "q", "k", "v", "a", "b")
        if not self._kernels.takes_gated_delta(k.shape[-1]) or k.shape[1] == 0 or v.shape[1] % k.shape[1]:
            return None
        bound = given.get("lower_bound")
        gates = DeltaGates(
            kind="softplus" if bound is None else "bounded",
            A_log=given["A_log"],
            dt_bias=given["dt_bias"],
            lower_bound=bound or 0.0,
            beta_scale=2.0 if given.get("allow_neg_eigval") else 1.0,
        )

        def run(pool: mx.array, step: Any) -> tuple[mx.array, mx.array]:
            return self._kernels.gated_delta(pool, step, q, k, v, a, b, gates=gates)

        state = (*v.shape[1:], k.shape[-1])
        return Advance(Entry(state, mx.float32), run, lambda y: y[None].astype(q.dtype))

    def _ssm(self, given: Arguments) -> Advance | None:
        x, B, C, dt = rows_of(given, "hidden_states", "B", "C", "dt")
        if not self._kernels.takes_ssd(B.shape[-1]) or x.shape[1] % B.shape[1]:
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

        def run(pool: mx.array, step: Any) -> tuple[mx.array, mx.array]:
            return self._kernels.ssd(pool, step, x, B, C, dt, parameters=parameters)

        return Advance(Entry((*x.shape[1:], B.shape[-1]), mx.float32), run, lambda y: y[None])
