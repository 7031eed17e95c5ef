"""How long a step will take, learned from the steps before it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from .types import Work

_FORGETTING = 0.995  # weight of one step's observation per step after it: some 200 steps count
_PRIOR = 1e-3  # of the inverse covariance: what is known before the first step, next to nothing
_MAX_COVARIANCE = 1e6  # without news in some direction, forgetting would let it grow without bound


class StepShape(NamedTuple):
    """What a step's time depends on.

    num_decodes        rows of sequences that compute one token, and of their drafts
    num_chunk_tokens   prompt tokens
    num_positions      positions that the decoding rows attend to, in all
    chunk_positions    the same of prompt tokens
    """

    num_decodes: int
    num_chunk_tokens: int
    num_positions: int
    chunk_positions: int


class StepCost:
    """A linear model of a step's seconds, fitted by recursive least squares with forgetting.

    The terms are what dominates on any backend: a constant (reading the weights, the host's own work), a
    cost for each row, one for each position attended to. Errors are relative, so that steps of a long prompt
    do not drown the short ones. Five numbers that forget follow a machine whose speed drifts.
    (Ljung, System Identification, 2nd ed., section 11.2.)
    """

    def __init__(self) -> None:
        self._weights = [0.0] * 5
        self._covariance = [[1 / _PRIOR if i == j else 0.0 for j in range(5)] for i in range(5)]
        self.num_steps = 0

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step will take; 0 before anything was observed. Never less for a larger step: a
        coefficient that noise has made negative counts as none."""
        return sum(max(0.0, w) * x for w, x in zip(self._weights, _terms(shape), strict=True))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that took so long."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        self.num_steps += 1
        scale = 1 / seconds  # relative errors
        x = [term * scale for term in _terms(shape)]
        p = self._covariance
        px = [sum(row[j] * x[j] for j in range(5)) for row in p]
        gain_over = _FORGETTING + sum(x[i] * px[i] for i in range(5))
        error = 1.0 - sum(w * term for w, term in zip(self._weights, x, strict=True))
        for i in range(5):
            gain = px[i] / gain_over
            self._weights[i] += gain * error
            row = p[i]
            for j in range(5):
                row[j] = (row[j] - gain * px[j]) / _FORGETTING
        for i in range(5):
            if p[i][i] > _MAX_COVARIANCE:
                for j in range(5):
                    p[i][j] *= 0.5
                    p[j][i] *= 0.5


def with_chunk(shape: StepShape, start: int, num_tokens: int) -> StepShape:
    """The shape of a step with ``num_tokens`` more, of a prompt that stands at ``start``."""
    return shape._replace(
        num_chunk_tokens=shape.num_chunk_tokens + num_tokens,
        chunk_positions=shape.chunk_positions + num_tokens * start + num_tokens * (num_tokens + 1) // 2,
    )


def with_drafts(shape: StepShape, stop: int, num_drafts: int) -> StepShape:
    """The shape of a step with so many drafts more, of a sequence of ``stop`` tokens."""
    return shape._replace(
        num_decodes=shape.num_decodes + num_drafts, num_positions=shape.num_positions + num_drafts * stop
    )


def _terms(shape: StepShape) -> tuple[float, float, float, float, float]:
    """Scaled so that coefficients are of one order: milliseconds for most models."""
    decodes, chunk_tokens, positions, chunk_positions = shape
    return (1.0, decodes / 8, chunk_tokens / 64, positions / 8192, chunk_positions / 65536)


def shape_of(work: Iterable[Work]) -> StepShape:
    """The shape of a planned step."""
    num_decodes = num_positions = num_chunk_tokens = chunk_positions = 0
    for _, start, stop, _, _, drafts in work:
        if stop - start == 1:
            num_decodes += 1 + len(drafts)
            num_positions += stop * (1 + len(drafts))
        else:
            num_chunk_tokens += stop - start
            chunk_positions += (stop - start) * (start + stop + 1) // 2
    return StepShape(num_decodes, num_chunk_tokens, num_positions, chunk_positions)
