"""``sampler.sample`` by the native kernels: all rows of a step side by side, on the kernels' threads.

Rows whose parameters change no logit are drawn from where the model left them; the others are adjusted
in NumPy first, as float32. The draws are those of ``truncation``, with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from octavo.engine.model.logit_rows import float_row
from octavo.engine.sampler import NOT_FINITE, Sampled, SampleState, adjust_row, with_logprob
from octavo.engine.truncation import Floats
from octavo.kernels import _ext


def sample_natively(logits: mx.array, rows: Sequence[int], states: Sequence[SampleState]) -> list[Sampled]:
    """One token for each state, from that row of evaluated logits [S, V]; as ``sampler.sample``."""
    plain = [i for i, state in enumerate(states) if state.plain]
    draws = [_draw(states[i], rows[i], logits.shape[1]) for i in plain]
    found = dict(zip(plain, map(_sampled, _ext.draw_tokens(logits, draws)), strict=True))
    if len(plain) < len(states):
        others = [i for i in range(len(states)) if i not in found]
        found.update(zip(others, _sample_adjusted(logits, rows, states, others), strict=True))
    return [found[i] for i in range(len(states))]


def _sample_adjusted(
    logits: mx.array, rows: Sequence[int], states: Sequence[SampleState], which: Sequence[int]
) -> list[Sampled]:
    """Of the states ``which``."""
    sampled: dict[int, Sampled] = {}  # of rows that failed before the draw, then of the others
    adjusted: dict[int, Floats] = {}
    for i in which:
        row = adjust_row(float_row(logits, rows[i]), states[i])
        if isinstance(row, Sampled):
            sampled[i] = row
        else:
            adjusted[i] = row
    if adjusted:
        draws = [_draw(states[i], index, logits.shape[1]) for index, i in enumerate(adjusted)]
        tokens = _ext.draw_tokens(mx.array(np.stack(list(adjusted.values()))), draws)
        for (i, row), token in zip(adjusted.items(), tokens, strict=True):
            sampled[i] = with_logprob(_sampled(token), row, states[i].params)
    return [sampled[i] for i in which]


def _draw(state: SampleState, row: int, vocab_size: int) -> _ext.Draw:
    params = state.params
    return _ext.Draw(
        row,
        temperature=0.0 if state.greedy else params.temperature,
        top_k=min(params.top_k, vocab_size),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=state.seed,
        counter=state.num_generated,
    )


def _sampled(token: int | None) -> Sampled:
    return Sampled(token=token) if token is not None else Sampled(token=None, error=NOT_FINITE)
