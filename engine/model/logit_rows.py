"""Rows of a step's evaluated logits, and what draws tokens from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from octavo.engine.sampler import Sampled, SampleState, sample
from octavo.engine.truncation import Floats, Ids

DrawTokens = Callable[[mx.array, Sequence[int], Sequence[SampleState]], list[Sampled]]
"""One token for each state, from that row of evaluated logits [S, V]; as ``sampler.sample``."""


class LogitRows:
    """Evaluated logits [S, V] where MLX holds them, read as float32."""

    def __init__(self, logits: mx.array) -> None:
        self.size: int = logits.shape[1]
        self._is_bf16 = logits.dtype == mx.bfloat16
        self._values = np.array(logits.view(mx.uint16) if self._is_bf16 else logits, copy=False)

    def floats(self, row: int, ids: Ids) -> Floats:
        """Those of the tokens ``ids`` of one row."""
        values: Floats = self._values[row][ids].astype(np.uint32 if self._is_bf16 else np.float32)
        return np.left_shift(values, 16).view(np.float32) if self._is_bf16 else values

    def copy(self, row: int, out: Floats) -> None:
        """One row into ``out`` [V]: the upper half of a float32 is a bfloat16."""
        if self._is_bf16:
            np.left_shift(self._values[row], 16, out=out.view(np.uint32), dtype=np.uint32)
        else:
            out[:] = self._values[row]


def float_row(logits: mx.array, row: int) -> Floats:
    """One row of evaluated logits [S, V] as float32."""
    values = np.empty(logits.shape[1], np.float32)
    LogitRows(logits).copy(row, values)
    return values


def sample_in_numpy(logits: mx.array, rows: Sequence[int], states: Sequence[SampleState]) -> list[Sampled]:
    """``DrawTokens`` where there are no native kernels."""
    return sample((float_row(logits, row) for row in rows), states)
