from __future__ import annotations

import math
from dataclasses import dataclass, field

from octavo.scheduler import SchedulerOutput
from octavo.scheduler.drafts import NUM_ROWS

UNKNOWN_COST = 0.2
"""Assumed time of a draft before any step was timed, as a share of the time of a one-sequence step."""

_LEARNING = 0.05  # weight of the latest step in a mean, once twenty steps have been observed
_PRIOR = 2.0
_OUTLIER = 0.7


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    count: int = 0

    def add(self, value: float, *, prior: float = 0.0) -> None:
        self.count += 1
        error = value - self.value
        if self.count > 1 or prior:
            error = max(-_OUTLIER, min(_OUTLIER, error))
        self.value += max(_LEARNING, 1 / (self.count + prior)) * error


@dataclass(slots=True)
class _BatchTimes:
    share: _Mean
    without_drafts: _Mean = field(default_factory=_Mean)
    cells: dict[int, _Mean] = field(default_factory=dict)


class DraftTimes:
    """Step time with drafts divided by the time without, for each number of sequences and of drafts.

    Logarithms are averaged, because times double for a while on a busy machine. Time is not linear in the
    number of drafts: kernels compute eight rows in the time of seven.
    """

    def __init__(self) -> None:
        self._known: dict[int, _BatchTimes] = {}
        self._ratios: dict[int, tuple[tuple[int, float], ...]] = {}

    def observe(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Learn from the time of a step in which every sequence decoded, with ``num_drafts`` in total."""
        if not (math.isfinite(seconds) and seconds > 0 and num_sequences):
            return
        known = self._known.get(num_sequences)
        if known is None:
            known = self._known[num_sequences] = _BatchTimes(_Mean(self.cost(num_sequences)))
            self._ratios.clear()
        if not num_drafts:
            known.without_drafts.add(math.log(seconds))
        elif num_drafts not in known.cells:
            known.cells[num_drafts] = _Mean()
        elif known.without_drafts.count:
            self._ratios.clear()
            ratio = math.log(seconds) - known.without_drafts.value
            ratio = max(-_OUTLIER, min(ratio, math.log1p(self.cost(num_sequences) * num_drafts) + _OUTLIER))
            known.share.add(math.expm1(ratio) / num_drafts, prior=_PRIOR)
            known.cells[num_drafts].add(ratio)

    def ratios(self, num_sequences: int) -> tuple[tuple[int, float], ...]:
        """Return a pair (number of drafts, relative time of a step) for each number in ``NUM_ROWS``."""
        if (made := self._ratios.get(num_sequences)) is None:
            made = self._ratios[num_sequences] = self._compute_ratios(num_sequences)
        return made

    def _compute_ratios(self, num_sequences: int) -> tuple[tuple[int, float], ...]:
        known = self._known.get(num_sequences)
        share = self.cost(num_sequences)
        cells = {} if known is None else known.cells
        found: list[tuple[int, float]] = []
        least = 1.0
        for count in NUM_ROWS:
            ratio = 1.0 + share * count
            if (cell := cells.get(count)) is not None and cell.count:
                seen = min(cell.count, 1 / _LEARNING)
                ratio = (_PRIOR * ratio + seen * math.exp(cell.value)) / (_PRIOR + seen)
            least = max(least, ratio)
            found.append((count, least))
        return tuple(found)

    def cost(self, num_sequences: int) -> float:
        """Return the time of one more draft divided by the time of a step without drafts."""
        if (known := self._known.get(num_sequences)) is not None:
            return max(0.0, known.share.value)
        if not num_sequences or not self._known:
            return UNKNOWN_COST / max(1, num_sequences)
        nearest = min(self._known, key=lambda number: abs(math.log(number / num_sequences)))
        return self.cost(nearest) * nearest / num_sequences


def draft_rows(step: SchedulerOutput) -> tuple[int, int] | None:
    """Return a step's numbers of sequences and of drafts; None unless every sequence decodes."""
    if step.decode_only:
        return len(step.work), 0
    num_drafts = 0
    for _, start, stop, samples, parallel_samples, drafts in step.work:
        if not samples or parallel_samples or stop - start != 1:
            return None
        num_drafts += len(drafts)
    return len(step.work), num_drafts
