"""Which rows of a step say how likely a prompt was, and where the answers go."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from octavo.scheduler import SchedulerOutput, Sequence

from ..api.outputs import TokenLogprob
from ..executor.batch import ScoredRows
from .request import Request, Sample


class PromptScores:
    """Between ``rows_of`` a step and ``record`` of what the runner made of it, remembers whose rows
    they are. A request that is preempted in the middle is scored again from its beginning."""

    def __init__(self) -> None:
        self._owners: list[tuple[Request, int]] = []  # (whose, position of the token that is scored)

    def rows_of(self, step: SchedulerOutput, samples: Mapping[Sequence, Sample]) -> ScoredRows | None:
        """The rows before each prompt token that is asked for; None when nobody asks."""
        self._owners = []
        asked = [self._is_asked(item.sequence, samples) for item in step.work]
        if not any(asked):
            return None
        rows: list[int] = []
        first = 0
        for item, wanted in zip(step.work, asked, strict=True):
            sequence, start, stop, *_ = item
            if wanted:
                positions = range(start + 1, min(stop + 1, sequence.num_prompt))
                rows += range(first, first + len(positions))
                self._owners += [(samples[sequence].request, position) for position in positions]
            first += item.end - start
        return ScoredRows(
            rows=np.array(rows, np.int32),
            targets=np.array([request.prompt_ids[at] for request, at in self._owners], np.int32),
            num_top=np.array([request.params.prompt_logprobs for request, _ in self._owners], np.int32),
        )

    def _is_asked(self, sequence: Sequence, samples: Mapping[Sequence, Sample]) -> bool:
        return sequence.skip_prefix_cache and samples[sequence].request.params.prompt_logprobs is not None

    def record(self, scores: tuple[TokenLogprob, ...]) -> None:
        """Give the requests their scores; one that has them all may use cached pages again."""
        for (request, position), score in zip(self._owners, scores, strict=True):
            request.prompt_scores[position] = score
            if position == request.num_prompt - 1:
                for sample in request.samples:
                    sample.sequence.skip_prefix_cache = False
