"""``sampler.sample`` by the native kernels: all rows of a step side by side, on the kernels' threads.

Rows whose parameters change no logit are drawn from where the model left them; the others are adjusted
in NumPy first, as float32. The draws are those of ``truncation``, with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from octavo.engine.model.logit_rows import copy_float_row
from octavo.engine.sampler import NOT_FINITE, Sampled, SampleState, adjust_row, with_logprob
from octavo.engine.truncation import Floats
from octavo.kernels import _ext


class NativeSampling:
    """``DrawTokens`` for one engine's thread; keeps the memory of adjusted rows from step to step."""

    def __init__(self) -> None:
        self._adjusted: Floats = np.empty((0, 0), np.float32)

    def __call__(self, logits: mx.array, rows: Sequence[int], states: Sequence[SampleState]) -> list[Sampled]:
        plain = [i for i, state in enumerate(states) if state.plain]
        draws = [_draw(states[i], rows[i], logits.shape[1]) for i in plain]
        found = dict(zip(plain, map(_sampled, _ext.draw_tokens(logits, draws)), strict=True))
        others = [i for i in range(len(states)) if i not in found]
        if others:
            found.update(self._sample_adjusted(logits, rows, states, others))
        return [found[i] for i in range(len(states))]

    def _sample_adjusted(
        self, logits: mx.array, rows: Sequence[int], states: Sequence[SampleState], which: Sequence[int]
    ) -> dict[int, Sampled]:
        """Of the states ``which``."""
        adjusted = self._room(len(which), logits.shape[1])
        sampled: dict[int, Sampled] = {}
        for i, row in zip(which, adjusted, strict=True):
            copy_float_row(logits, rows[i], row)
            failure = adjust_row(row, states[i])
            if failure is not None:
                sampled[i] = failure
        good = [(place, i) for place, i in enumerate(which) if i not in sampled]
        draws = [_draw(states[i], place, logits.shape[1]) for place, i in good]
        for (place, i), token in zip(good, _ext.draw_tokens_from_numpy(adjusted, draws), strict=True):
            sampled[i] = with_logprob(_sampled(token), adjusted[place], states[i].params)
        return sampled

    def _room(self, num_rows: int, width: int) -> Floats:
        if self._adjusted.shape[0] < num_rows or self._adjusted.shape[1] != width:
            self._adjusted = np.empty((num_rows, width), np.float32)
        return self._adjusted[:num_rows]


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
