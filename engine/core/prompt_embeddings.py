"""Which rows of a step make up the embedding of a prompt, and where their hidden states go."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from octavo.kernels.metadata import Ints
from octavo.scheduler import SchedulerOutput, Sequence

from .request import Request, Sample


class PromptEmbeddings:
    """Between ``rows_of`` a step and ``record`` of what the runner made of it, remembers whose rows they
    are. The mean is one of float64 sums; a prompt that is computed again is summed again."""

    def __init__(self) -> None:
        self._owners: list[tuple[Request, int, int]] = []  # (whose, its first position here, rows)

    def rows_of(self, step: SchedulerOutput, samples: Mapping[Sequence, Sample]) -> Ints | None:
        """Rows [P], ascending, whose hidden states are asked for; None when nobody asks."""
        self._owners = []
        rows: list[int] = []
        first = 0
        for item in step.work:
            request = samples[item.sequence].request
            stop = min(item.stop, request.num_prompt)
            if request.params.pooling is not None and item.start < stop:
                whole = request.params.pooling == "mean"
                start = item.start if whole else max(item.start, request.num_prompt - 1)
                rows += range(first + start - item.start, first + stop - item.start)
                if start < stop:
                    self._owners.append((request, start, stop - start))
            first += item.end - item.start
        return np.array(rows, np.int32) if rows else None

    def record(self, states: npt.NDArray[np.float32] | None) -> None:
        """Give the requests their hidden states [P, D]; one that has them all has its embedding."""
        if states is None:
            return
        first = 0
        for request, start, count in self._owners:
            part = states[first : first + count].astype(np.float64).sum(axis=0)
            first += count
            is_whole = request.params.pooling == "mean"
            request.pooled = part if not is_whole or start == 0 else request.pooled + part
            if start + count == request.num_prompt:
                total = request.pooled / (request.num_prompt if is_whole else 1)
                request.embedding = tuple(total.tolist())
                for sample in request.samples:
                    sample.sequence.skip_prefix_cache = False
