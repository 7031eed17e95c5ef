"""Durations of steps with drafts, relative to steps without, learned from both."""

from __future__ import annotations

import math

NUM_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""How many drafts a step has, in all: few numbers, for a step that has had its number of rows before runs as
a captured program. The first one of each number takes many times as long where the model is small, and is not
counted."""

UNKNOWN_COST = 0.2
"""Of a draft beside one sequence, as a share of its step, before any step was timed."""

_LEARNING = 0.05  # weight of the latest step, after about twenty steps
_PRIOR = 2.0  # steps: weight of the line through all numbers of drafts, at one of them
_OUTLIER = 0.7  # limit of the logarithm of actual over expected time; about twice as long


class _Mean:
    """Exponential mean that no single value changes much."""

    __slots__ = ("count", "value")

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self.count = 0

    def add(self, value: float, *, prior: float = 0.0) -> None:
        self.count += 1
        error = value - self.value
        if self.count > 1 or prior:
            error = max(-_OUTLIER, min(_OUTLIER, error))
        self.value += max(_LEARNING, 1 / (self.count + prior)) * error


class _OfSequences:
    """What was learned about one number of sequences."""

    def __init__(self, share: float) -> None:
        self.plain = _Mean()  # logarithm of a step's seconds
        self.share = _Mean(share)  # share of the plain step's time, per draft
        self.cells: dict[int, _Mean] = {}  # logarithm of the ratio, by the number of drafts


class DraftTimes:
    """Ratios of step times, by number of sequences and of drafts.

    Times double and triple for a while on a busy machine, so logarithms are averaged and outliers are
    limited. A straight line would not do: kernels compute eight rows in the time of seven, and the second row
    takes longer than the third. A number of drafts that was rarely computed is assumed to lie near the line
    through the others.
    """

    def __init__(self) -> None:
        self._known: dict[int, _OfSequences] = {}
        self._ratios: dict[int, tuple[tuple[int, float], ...]] = {}  # cached until something is learned

    def observe(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Record the time of a step that computed one token per sequence and drafts, and nothing else."""
        if not (math.isfinite(seconds) and seconds > 0 and num_sequences):
            return
        known = self._known.get(num_sequences)
        if known is None:
            known = self._known[num_sequences] = _OfSequences(self.cost(num_sequences))
            self._ratios.clear()
        if not num_drafts:
            known.plain.add(math.log(seconds))
        elif num_drafts not in known.cells:  # the first step with this number of rows captures a program
            known.cells[num_drafts] = _Mean()
        elif known.plain.count:
            self._ratios.clear()
            ratio = math.log(seconds) - known.plain.value
            ratio = max(-_OUTLIER, min(ratio, math.log1p(self.cost(num_sequences) * num_drafts) + _OUTLIER))
            known.share.add(math.expm1(ratio) / num_drafts, prior=_PRIOR)
            known.cells[num_drafts].add(ratio)

    def ratios(self, num_sequences: int) -> tuple[tuple[int, float], ...]:
        """Return pairs of a number of drafts and a step's relative time with them.

        The numbers are those of ``NUM_ROWS``, and times never fall with more drafts. The same object is
        returned until something is learned.
        """
        if (made := self._ratios.get(num_sequences)) is None:
            made = self._ratios[num_sequences] = self._made(num_sequences)
        return made

    def _made(self, num_sequences: int) -> tuple[tuple[int, float], ...]:
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
        """Return the time of one of many drafts, as a share of a step without drafts."""
        if (known := self._known.get(num_sequences)) is not None:
            return max(0.0, known.share.value)
        if not num_sequences or not self._known:
            return UNKNOWN_COST / max(1, num_sequences)
        nearest = self._nearest(num_sequences)
        return self.cost(nearest) * nearest / num_sequences

    def _nearest(self, num_sequences: int) -> int:
        return min(self._known, key=lambda number: abs(math.log(number / num_sequences)))
