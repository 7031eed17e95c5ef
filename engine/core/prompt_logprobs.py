"""Log-probabilities of prompt tokens, as a part of steps."""

from __future__ import annotations

import numpy as np

from octavo.scheduler import SchedulerOutput, Sequence

from ..executor.batch import ScoredRows
from .request import Request, Sample
from .step_parts import PartResults, PartRows, StepPart


class PromptScores(StepPart):
    """Scores prompts of requests with ``prompt_logprobs``. A request that is preempted within the prompt is
    scored again from its beginning."""

    def __init__(self) -> None:
        self._unscored: dict[Sequence, Request] = {}
        self._owners: list[
            tuple[Request, int]
        ] = []  # request of each row, with the position of the scored token

    @property
    def is_live(self) -> bool:
        return bool(self._unscored)

    def begin(self, request: Request) -> None:
        if request.params.prompt_logprobs is not None:
            self._unscored.update((sample.sequence, request) for sample in request.samples)

    def rows(self, step: SchedulerOutput) -> PartRows | None:
        """Return the rows before each prompt token to be scored."""
        self._owners = []
        rows: list[int] = []
        first = 0
        for sequence, start, stop, _, _, drafts in step.work:
            if (request := self._unscored.get(sequence)) is not None:
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
        """Give requests their scores; a request that has all of them may use cached pages again."""
        for (request, position), score in zip(self._owners, results.scores, strict=True):
            request.prompt_scores[position] = score
            if position == request.num_prompt - 1:
                for sample in request.samples:
                    sample.sequence.skip_prefix_cache = False
                    self.end(sample)

    def end(self, sample: Sample) -> None:
        self._unscored.pop(sample.sequence, None)
