from __future__ import annotations

from collections import abc

import numpy as np

from octavo.scheduler import SchedulerOutput, Sequence

from ..executor.batch import ScoredRows
from .request import Request, Sample
from .step_parts import PartResults, PartRows, StepPart


class _PromptPart(StepPart):
    _param: str

    def __init__(self) -> None:
        self._unfinished: dict[Sequence, Request] = {}

    @property
    def is_live(self) -> bool:
        return bool(self._unfinished)

    def begin(self, request: Request) -> None:
        if getattr(request.params, self._param) is not None:
            self._unfinished.update((sample.sequence, request) for sample in request.samples)

    def end(self, sample: Sample) -> None:
        self._unfinished.pop(sample.sequence, None)

    def _finish(self, request: Request) -> None:
        for sample in request.samples:
            sample.sequence.skip_prefix_cache = False
            self.end(sample)


class PromptScores(_PromptPart):
    """Computes the log-probabilities of prompt tokens for requests with ``prompt_logprobs``."""

    _param = "prompt_logprobs"

    def __init__(self) -> None:
        super().__init__()
        self._owners: list[tuple[Request, int]] = []

    def rows(self, step: SchedulerOutput) -> PartRows | None:
        self._owners = []
        rows: list[int] = []
        first = 0
        for sequence, start, stop, _, _, drafts in step.work:
            if (request := self._unfinished.get(sequence)) is not None:
                positions = range(start + 1, min(stop + 1, sequence.num_prompt))
                rows += range(first, first + len(positions))
                self._owners += [(request, position) for position in positions]
            first += stop + len(drafts) - start
        if not rows:
            return None
        scored = ScoredRows(
            rows=np.array(rows, np.int32),
            targets=np.array([request.prompt_ids[at] for request, at in self._owners], np.int32),
            num_top=np.array([request.params.prompt_logprobs for request, _ in self._owners], np.int32),
        )
        return PartRows(scored=scored)

    def deliver(self, results: PartResults) -> None:
        owners, self._owners = self._owners, []  # an idle engine keeps no request
        for (request, position), score in zip(owners, results.scores, strict=True):
            request.prompt_scores[position] = score
            if position == request.num_prompt - 1:
                self._finish(request)


class PromptEmbeddings(_PromptPart):
    _param = "pooling"

    def __init__(self) -> None:
        super().__init__()
        self._owners: list[tuple[Request, int, int]] = []

    def rows(self, step: SchedulerOutput) -> PartRows | None:
        self._owners = []
        rows: list[int] = []
        first = 0
        for item in step.work:
            request = self._unfinished.get(item.sequence)
            if request is not None and item.start < (stop := min(item.stop, request.num_prompt)):
                whole = request.params.pooling == "mean"
                start = item.start if whole else max(item.start, request.num_prompt - 1)
                rows += range(first + start - item.start, first + stop - item.start)
                if start < stop:
                    self._owners.append((request, start, stop - start))
            first += item.end - item.start
        return PartRows(hidden=np.array(rows, np.int32)) if rows else None

    def deliver(self, results: PartResults) -> None:
        assert results.hidden is not None
        first = 0
        for request, start, count in self._owners:
            part = results.hidden[first : first + count].astype(np.float64).sum(axis=0)
            first += count
            is_whole = request.params.pooling == "mean"
            request.pooled = part if not is_whole or start == 0 else request.pooled + part
            if start + count == request.num_prompt:
                total = request.pooled / (request.num_prompt if is_whole else 1)
                request.embedding = tuple(total.tolist())
                self._finish(request)


class Grammars(StepPart):
    """Starts computing grammar masks after a step, and holds sequences whose masks are late."""

    def __init__(self, *, may_be_late: bool) -> None:
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

    def paused(self) -> set[Sequence]:
        return {
            sample.sequence
            for sample in self._samples
            if (constraint := sample.state.constraint) is not None and constraint.is_late
        }

    def prepare(self, unfinished: abc.Sequence[Sample]) -> None:
        for sample in unfinished:
            if sample.state.constraint is not None:
                sample.state.constraint.prepare(sample.drafts)

    def end(self, sample: Sample) -> None:
        self._samples.discard(sample)
        if sample.state.constraint is not None:
            sample.state.constraint.drop()
