"""``RecurrentKernels`` on native kernels that write states in place.

A kernel returns a new handle of the pool; the old handle must not be used again. Each evaluation advances the
states: see ``StateSegments``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .. import _ext
from ..recurrent_kernels import READY, DeltaGates, SsdParameters
from ..state_segments import StateSegments

MAX_KEY_DIM = 256
KEY_DIM_MULTIPLE = 16
_GATES = ("ready", "softplus", "bounded")  # in the order of Gates in csrc/recurrent/kernels.h


@dataclass(frozen=True, slots=True)
class StateArrays:
    segments: mx.array
    checkpoints: mx.array

    @classmethod
    def of(cls, step: StateSegments) -> StateArrays:
        return cls(mx.array(step.segments), mx.array(step.checkpoints))


arrays = StateArrays.of
bind = StateArrays


def zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return a pool of zeros, on huge pages if possible."""
    rows = _ext.zeroed_rows(shape[0], math.prod(shape[1:]) * dtype.size)
    pool = rows.view(dtype).reshape(shape)
    mx.eval(pool)
    return pool


def mark_nonfinite(flags: mx.array, step: StateArrays, y: mx.array) -> mx.array:
    return _ext.mark_nonfinite(flags, step.segments, step.checkpoints, y)


def rows_behind(window: mx.array, keep: int) -> mx.array:
    return _ext.rows_behind(window, keep)


def takes_gated_delta(key_dim: int) -> bool:
    return key_dim % KEY_DIM_MULTIPLE == 0 and 0 < key_dim <= MAX_KEY_DIM


def takes_ssd(state_dim: int) -> bool:
    return state_dim % KEY_DIM_MULTIPLE == 0 and state_dim > 0


def recurrence(
    name: str, pool: mx.array, step: StateArrays, inputs: list[mx.array], options: Sequence[float] = ()
) -> tuple[mx.array, mx.array]:
    """Compute a recurrence by its name; return the pool's new handle and y.

    ``RareRecurrence`` lists the names and the shapes of inputs.
    """
    return _ext.recurrence(name, pool, step.segments, step.checkpoints, inputs, list(options))


def gated_delta(
    pool: mx.array,
    step: StateArrays,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    *,
    gates: DeltaGates = READY,
) -> tuple[mx.array, mx.array]:
    parameters: list[mx.array] = []
    if gates.kind != "ready":
        if gates.A_log is None or gates.dt_bias is None:
            raise ValueError(f"gates of {gates.kind} need A_log and dt_bias")
        parameters = [gates.dt_bias, gates.A_log]
    options = [float(_GATES.index(gates.kind)), gates.lower_bound, gates.beta_scale]
    return recurrence("gated_delta", pool, step, [q, k, v, a, b, *parameters], options)


def causal_conv(
    pool: mx.array,
    step: StateArrays,
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    *,
    silu: bool = False,
) -> tuple[mx.array, mx.array]:
    inputs = [x, weight] if bias is None else [x, weight, bias]
    return recurrence("causal_conv", pool, step, inputs, [float(silu)])


def ssd(
    pool: mx.array,
    step: StateArrays,
    x: mx.array,
    B: mx.array,
    C: mx.array,
    dt: mx.array,
    *,
    parameters: SsdParameters,
) -> tuple[mx.array, mx.array]:
    inputs = [x, B, C, dt, parameters.A_log, parameters.dt_bias, parameters.D]
    return recurrence("ssd", pool, step, inputs, [parameters.lowest, parameters.highest])
