"""Rows of a step's evaluated logits, and what draws tokens from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from octavo.engine.sampler import Sampled, SampleState, sample
from octavo.engine.truncation import Floats

DrawTokens = Callable[[mx.array, Sequence[int], Sequence[SampleState]], list[Sampled]]
"""One token for each state, from that row of evaluated logits [S, V]; as ``sampler.sample``."""


def float_row(logits: mx.array, row: int) -> Floats:
    """One row of evaluated logits [S, V] as float32."""
    values = np.empty(logits.shape[1], np.float32)
    copy_float_row(logits, row, values)
    return values


def copy_float_row(logits: mx.array, row: int, out: Floats) -> None:
    """The same into ``out`` [V]: the upper half of a float32 is a bfloat16."""
    if logits.dtype == mx.bfloat16:
        bits = np.array(logits.view(mx.uint16), copy=False)[row]
        np.left_shift(bits, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[:] = np.array(logits, copy=False)[row]


def sample_in_numpy(logits: mx.array, rows: Sequence[int], states: Sequence[SampleState]) -> list[Sampled]:
    """``DrawTokens`` where there are no native kernels."""
    return sample((float_row(logits, row) for row in rows), states)
