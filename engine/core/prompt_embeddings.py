"""Embeddings of prompts, as a part of steps."""

from __future__ import annotations

import numpy as np

from octavo.scheduler import SchedulerOutput, Sequence

from .request import Request, Sample
from .step_parts import PartResults, PartRows, StepPart


class PromptEmbeddings(StepPart):
    """Collects the hidden states of prompts for embeddings. The mean uses float64 sums; a recomputed prompt
    is summed again."""

    def __init__(self) -> None:
        self._unfinished: dict[Sequence, Request] = {}
        self._owners: list[tuple[Request, int, int]] = []  # (request, its first position in this step, rows)

    @property
    def is_live(self) -> bool:
        return bool(self._unfinished)

    def begin(self, request: Request) -> None:
        if request.params.pooling is not None:
            self._unfinished.update((sample.sequence, request) for sample in request.samples)

    def rows(self, step: SchedulerOutput) -> PartRows | None:
        """Return the rows of the prompts whose hidden states are needed."""
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
        """Give requests their hidden states; a request that has all of them gets its embedding."""
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
                for sample in request.samples:
                    sample.sequence.skip_prefix_cache = False
                    self.end(sample)

    def end(self, sample: Sample) -> None:
        self._unfinished.pop(sample.sequence, None)
