"""Masks of schemas and grammars, as a part of steps."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.scheduler import Sequence as Served

from .request import Request, Sample
from .step_parts import StepPart


class Grammars(StepPart):
    """Starts computing the next masks when all tokens of a step are known, because a token can be accepted
    only after the masks of its grammar."""

    def __init__(self, *, may_be_late: bool) -> None:
        """Begin without samples. ``may_be_late``: a row whose mask is late may be computed again."""
        self._samples: set[Sample] = set()
        self._may_be_late = may_be_late

    @property
    def is_live(self) -> bool:
        return bool(self._samples)

    def begin(self, request: Request) -> None:
        for sample in request.samples:
            if sample.state.constraint is not None:
                sample.state.mask_may_be_late = self._may_be_late
                self._samples.add(sample)

    def held(self) -> set[Served]:
        return {
            sample.sequence
            for sample in self._samples
            if (constraint := sample.state.constraint) is not None and constraint.is_late
        }

    def prepare(self, going_on: Sequence[Sample]) -> None:
        for sample in going_on:
            if sample.state.constraint is not None:
                sample.state.constraint.prepare(sample.sequence.drafts)

    def end(self, sample: Sample) -> None:
        self._samples.discard(sample)
        if sample.state.constraint is not None:
            sample.state.constraint.drop()
