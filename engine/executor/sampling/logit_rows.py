from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ...api.outputs import TokenLogprob
from .sampler import Sampled, SampleState, is_finite, logprob_of, sample
from .truncation import Floats


class Target(NamedTuple):
    row: int
    token: int
    num_top: int


class Sampler:
    """Samples tokens from evaluated logits [S, V], in NumPy."""

    def sample(self, logits: mx.array, rows: Sequence[int], states: Sequence[SampleState]) -> list[Sampled]:
        """Sample one token per state. ``rows[i]`` is the row of ``states[i]``."""
        return sample((float_row(logits, row) for row in rows), states)

    def score(self, logits: mx.array, targets: Sequence[Target]) -> list[TokenLogprob | None]:
        """Return log-probabilities; None for rows that are not finite."""
        return [_score(float_row(logits, row), token, num_top) for row, token, num_top in targets]


def float_row(logits: mx.array, row: int) -> Floats:
    if logits.dtype != mx.bfloat16:
        floats: Floats = np.array(logits, copy=False)[row].astype(np.float32)
        return floats
    bits = np.array(logits.view(mx.uint16), copy=False)[row]
    values: Floats = np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
    return values


def _score(values: Floats, token: int, num_top: int) -> TokenLogprob | None:
    return logprob_of(values, token, num_top) if is_finite(values) else None
