"""``sampler.sample`` by the native kernels: all rows of a step side by side, on the kernels' threads.

Rows are drawn from where the model left them. What penalties, a bias and min_tokens make of the logits of
some tokens is computed here, for those tokens alone; the kernels draw from the row as if it had them. Only
rows that ask for log-probabilities are written out as float32. The draws are those of ``truncation``, with
the same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from octavo.engine.constraints.constraint import ConstraintFailed, Mask
from octavo.engine.model.logit_rows import LogitRows
from octavo.engine.sampler import NOT_FINITE, Sampled, SampleState, adjust_row, with_logprob
from octavo.engine.truncation import Floats, Ids
from octavo.kernels import _ext


class NativeSampling:
    """``DrawTokens`` for one engine's thread; keeps its memory from step to step."""

    def __init__(self) -> None:
        self._adjusted: Floats = np.empty((0, 0), np.float32)
        self._changed: Floats = np.empty(0, np.float32)  # one row, of which changed tokens mean something

    def __call__(self, logits: mx.array, rows: Sequence[int], states: Sequence[SampleState]) -> list[Sampled]:
        row_values = LogitRows(logits)
        found: dict[int, Sampled] = {}
        draws: dict[int, _ext.Draw] = {}
        for i, state in enumerate(states):
            if state.params.logprobs is not None:
                continue
            try:
                draws[i] = self._draw(row_values, rows[i], state)
            except ConstraintFailed as error:
                found[i] = Sampled(token=None, error=str(error))
        drawn = _ext.draw_tokens(logits, list(draws.values()))
        found.update(zip(draws, map(_sampled, drawn), strict=True))
        if others := [i for i in range(len(states)) if i not in found]:
            found.update(self._sample_adjusted(row_values, rows, states, others))
        return [found[i] for i in range(len(states))]

    def _draw(self, logits: LogitRows, row: int, state: SampleState) -> _ext.Draw:
        if state.plain:
            return _draw_of(state, row, logits.size)
        ids = state.changed_ids
        if len(ids) == 0:
            return _draw_of(state, row, logits.size, allowed=state.allowed())
        if len(self._changed) != logits.size:
            self._changed = np.empty(logits.size, np.float32)
        self._changed[ids] = logits.floats(row, ids)
        state.change(self._changed)
        allowed, changed = state.allowed(), self._changed[ids]
        if allowed is not None:
            changed = np.where(allowed[ids], changed, np.float32(-np.inf))
        return _draw_of(state, row, logits.size, changed_ids=ids, changed=changed, allowed=allowed)

    def _sample_adjusted(
        self, logits: LogitRows, rows: Sequence[int], states: Sequence[SampleState], which: Sequence[int]
    ) -> dict[int, Sampled]:
        """Of the states ``which``."""
        adjusted = self._room(len(which), logits.size)
        sampled: dict[int, Sampled] = {}
        for i, row in zip(which, adjusted, strict=True):
            logits.copy(rows[i], row)
            failure = adjust_row(row, states[i])
            if failure is not None:
                sampled[i] = failure
        good = [(place, i) for place, i in enumerate(which) if i not in sampled]
        draws = [_draw_of(states[i], place, logits.size) for place, i in good]
        for (place, i), token in zip(good, _ext.draw_tokens_from_numpy(adjusted, draws), strict=True):
            sampled[i] = with_logprob(_sampled(token), adjusted[place], states[i].params)
        return sampled

    def _room(self, num_rows: int, width: int) -> Floats:
        if self._adjusted.shape[0] < num_rows or self._adjusted.shape[1] != width:
            self._adjusted = np.empty((num_rows, width), np.float32)
        return self._adjusted[:num_rows]


def _draw_of(
    state: SampleState,
    row: int,
    vocab_size: int,
    *,
    changed_ids: Ids | None = None,
    changed: Floats | None = None,
    allowed: Mask | None = None,
) -> _ext.Draw:
    params = state.params
    return _ext.Draw(
        row,
        temperature=0.0 if state.greedy else params.temperature,
        top_k=min(params.top_k, vocab_size),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=state.seed,
        counter=state.num_generated,
        changed_ids=changed_ids,
        changed=changed,
        allowed=allowed,
    )


def _sampled(token: int | None) -> Sampled:
    return Sampled(token=token) if token is not None else Sampled(token=None, error=NOT_FINITE)
