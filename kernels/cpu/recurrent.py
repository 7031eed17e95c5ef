"""Recurrent layers on the native kernels: states in slots, written in place.

Every function takes a pool [num_slots, ...] and the rows of a step, and returns the pool's new handle and
y. The old handle is the same memory and must not be used again. Each evaluation advances the states: see
``StateSegments``. Bits of y and of states depend on the instruction level and on a sequence's own tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from .. import _ext
from ..recurrent_kernels import READY, DeltaGates, SsdParameters, StateCapture
from ..state_segments import StateSegments
from .programs import CpuPrograms

MAX_KEY_DIM = 256
KEY_DIM_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class StateArrays:
    """A step's segments and checkpoints as the kernels read them, for all layers."""

    segments: mx.array
    checkpoints: mx.array

    @classmethod
    def of(cls, step: StateSegments) -> StateArrays:
        """Make the arrays of a step that was checked against the pool: kernels stop the process at indices
        outside of it."""
        return cls(mx.array(step.segments), mx.array(step.checkpoints))


arrays = StateArrays.of


def zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """A pool on huge pages where there are some: one token's walk through states is bound by memory."""
    rows = _ext.zeroed_rows(shape[0], math.prod(shape[1:]) * dtype.size)
    pool = rows.view(dtype).reshape(shape)
    mx.eval(pool)
    return pool


def mark_nonfinite(flags: mx.array, step: StateArrays, y: mx.array) -> mx.array:
    """See ``RecurrentKernels.mark_nonfinite``: the new handle of flags that are written in place."""
    return _ext.mark_nonfinite(flags, step.segments, step.checkpoints, y)


def rows_behind(window: mx.array, keep: int) -> mx.array:
    """See ``RecurrentKernels.rows_behind``: of two arrays put together the second, which is not copied."""
    return _ext.rows_behind(window, keep)


def state_capture() -> StateCapture:
    """See ``RecurrentKernels.state_capture``."""
    return StateCapture(CpuPrograms(), lambda arrays: StateArrays(*arrays))


def takes_gated_delta(key_dim: int) -> bool:
    return key_dim % KEY_DIM_MULTIPLE == 0 and 0 < key_dim <= MAX_KEY_DIM


def takes_ssd(state_dim: int) -> bool:
    return state_dim % KEY_DIM_MULTIPLE == 0 and state_dim > 0


def takes_lightning(key_dim: int, value_dim: int) -> bool:
    return key_dim % 2 == 0 and value_dim % KEY_DIM_MULTIPLE == 0


takes_selective_scan = takes_ssd
takes_wkv7 = takes_ssd


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
    """See ``RecurrentKernels.gated_delta``."""
    return _ext.gated_delta(
        pool,
        step.segments,
        step.checkpoints,
        q,
        k,
        v,
        a,
        b,
        A_log=gates.A_log,
        dt_bias=gates.dt_bias,
        gates=gates.kind,
        lower_bound=gates.lower_bound,
        beta_scale=gates.beta_scale,
    )


def causal_conv(
    pool: mx.array,
    step: StateArrays,
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    *,
    silu: bool = False,
) -> tuple[mx.array, mx.array]:
    """See ``RecurrentKernels.causal_conv``."""
    return _ext.causal_conv(pool, step.segments, step.checkpoints, x, weight, bias, silu=silu)


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
    """See ``RecurrentKernels.ssd``."""
    return _ext.ssd(
        pool,
        step.segments,
        step.checkpoints,
        x,
        B,
        C,
        dt,
        parameters.A_log,
        parameters.dt_bias,
        parameters.D,
        lowest=parameters.lowest,
        highest=parameters.highest,
    )


def lightning(
    pool: mx.array,
    step: StateArrays,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    log_decay: mx.array,
    scale: float,
) -> tuple[mx.array, mx.array]:
    """See ``RareRecurrentKernels.lightning``."""
    return _ext.lightning(pool, step.segments, step.checkpoints, q, k, v, log_decay, scale=scale)


def selective_scan(
    pool: mx.array,
    step: StateArrays,
    x: mx.array,
    d: mx.array,
    B: mx.array,
    C: mx.array,
    *,
    A: mx.array,
    D: mx.array,
) -> tuple[mx.array, mx.array]:
    """See ``RareRecurrentKernels.selective_scan``."""
    return _ext.selective_scan(pool, step.segments, step.checkpoints, x, d, B, C, A, D)


def rg_lru(
    pool: mx.array, step: StateArrays, x: mx.array, input_gate: mx.array, a_gate: mx.array, *, c: mx.array
) -> tuple[mx.array, mx.array]:
    """See ``RareRecurrentKernels.rg_lru``."""
    return _ext.rg_lru(pool, step.segments, step.checkpoints, x, input_gate, a_gate, c)


def wkv7(
    pool: mx.array,
    step: StateArrays,
    r: mx.array,
    w: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
) -> tuple[mx.array, mx.array]:
    """See ``RareRecurrentKernels.wkv7``."""
    return _ext.wkv7(pool, step.segments, step.checkpoints, r, w, k, v, a, b)
