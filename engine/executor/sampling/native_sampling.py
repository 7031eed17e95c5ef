"""``Sampler`` on the native kernels, which process rows in parallel threads."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from octavo.kernels import _ext

from ...api.outputs import TokenLogprob
from ...structured_output.constraint import ConstraintFailed
from ...structured_output.mask_threads import MaskLate
from .logit_rows import Sampler, Target, float_row
from .sampler import LATE, NO_TOKEN_LEFT, NOT_FINITE, Sampled, SampleState, is_finite


class NativeSampler(Sampler):
    def sample(self, logits: mx.array, rows: Sequence[int], states: Sequence[SampleState]) -> list[Sampled]:
        vocab_size = logits.shape[1]
        draws: list[_ext.Draw] = []
        failed: dict[int, Sampled] = {}
        for i, (row, state) in enumerate(zip(rows, states, strict=True)):
            try:
                draws.append(_draw_of(state, row, vocab_size))
            except ConstraintFailed as error:
                failed[i] = Sampled(token=None, error=str(error), invalid=True)
            except MaskLate:
                failed[i] = LATE
        drawn = map(_sampled, _ext.draw_tokens(logits, draws))
        sampled = [failed[i] if i in failed else next(drawn) for i in range(len(states))]
        for i, (row, state) in enumerate(zip(rows, states, strict=True)):
            if (
                sampled[i].error == NOT_FINITE
                and not state.is_unprocessed
                and is_finite(float_row(logits, row))
            ):
                sampled[i] = Sampled(token=None, error=NO_TOKEN_LEFT, invalid=True)
        return sampled

    def score(self, logits: mx.array, targets: Sequence[Target]) -> list[TokenLogprob | None]:
        scores = _ext.score_tokens(logits, list(targets))
        return [
            None if score is None else _logprob(target.token, score)
            for target, score in zip(targets, scores, strict=True)
        ]


def _draw_of(state: SampleState, row: int, vocab_size: int) -> _ext.Draw:
    params, changes = state.params, None if state.is_unprocessed else state.changes
    return _ext.Draw(
        row,
        temperature=0.0 if state.greedy else params.temperature,
        top_k=min(params.top_k, vocab_size),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=state.seed,
        counter=state.num_generated,
        changes=None if changes is None else _ext.LogitAdjustments(*changes),
        allowed=None if state.is_unprocessed else state.allowed(),
        num_top=params.logprobs,
    )


def _sampled(drawn: _ext.Drawn) -> Sampled:
    if (token := drawn.token) is None:
        return Sampled(token=None, error=NOT_FINITE)
    score = drawn.score
    return Sampled(token=token, logprob=None if score is None else _logprob(token, score))


def _logprob(token: int, score: _ext.TokenScore) -> TokenLogprob:
    return TokenLogprob(token, score.logprob, tuple(score.top))
