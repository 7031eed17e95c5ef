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
from ..state_segments import StateSegments

MAX_KEY_DIM = 256
WIDTH_MULTIPLE = 16


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


def takes(name: str, width: int) -> bool:
    if name == "rg_lru":
        return True
    return width % WIDTH_MULTIPLE == 0 and 0 < width <= (MAX_KEY_DIM if name == "gated_delta" else width)


def recurrence(
    name: str, pool: mx.array, step: StateArrays, inputs: Sequence[mx.array], options: Sequence[float] = ()
) -> tuple[mx.array, mx.array]:
    return _ext.recurrence(name, pool, step.segments, step.checkpoints, list(inputs), list(options))
