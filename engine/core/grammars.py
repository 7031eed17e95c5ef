"""Masks of schemas and grammars, as a part of steps."""

from __future__ import annotations

from collections.abc import Sequence

from .request import Request, Sample
from .step_parts import StepPart


class Grammars(StepPart):
    """Begins the next masks when all tokens of a step are known: accepting a token waits for the masks of its
    own grammar."""

    def __init__(self) -> None:
        self._samples: set[Sample] = set()

    @property
    def is_live(self) -> bool:
        return bool(self._samples)

    def begin(self, request: Request) -> None:
        self._samples.update(sample for sample in request.samples if sample.state.constraint is not None)

    def prepare(self, going_on: Sequence[Sample]) -> None:
        for sample in going_on:
            if sample.state.constraint is not None:
                sample.state.constraint.prepare(sample.sequence.drafts)

    def end(self, sample: Sample) -> None:
        self._samples.discard(sample)
