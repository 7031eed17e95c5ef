"""Longest cached prefix first, within a bound on how often the oldest is overtaken."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice

from octavo.block_manager import BlockManager

from ..types import Sequence
from .cached_lengths import CachedLengths
from .first_come import LOOK_AHEAD, FirstComeQueue

MAX_OVERTAKEN = 32
"""Younger ones that are let in before the oldest: so the k-th oldest waits for no more than 32 k others."""


class AgeBound:
    """How often sequences have been overtaken while they were the oldest to wait."""

    def __init__(self) -> None:
        self._overtaken: dict[Sequence, int] = {}

    def is_due(self, oldest: Sequence) -> bool:
        """Whether it comes before everybody else, now."""
        return self._overtaken.get(oldest, 0) >= MAX_OVERTAKEN

    def leaves(self, sequence: Sequence, oldest: Sequence) -> None:
        """One of those among whom ``oldest`` has waited longest waits no more."""
        if oldest is sequence:
            self._overtaken.pop(sequence, None)
        else:
            self._overtaken[oldest] = self._overtaken.get(oldest, 0) + 1


class LongestPrefixQueue(FirstComeQueue):
    """By priority, then those with most in the prefix cache, so that it is used before it is evicted.

    Whoever had to give its pages back comes first, and so does the oldest once it has been overtaken
    ``MAX_OVERTAKEN`` times. Only the first ``LOOK_AHEAD`` of a priority are compared.
    """

    def __init__(self, blocks: BlockManager) -> None:
        super().__init__()
        self._lengths = CachedLengths(blocks)
        self._age = AgeBound()
        self._interrupted: set[Sequence] = set()

    def offers(self) -> Iterator[Sequence]:
        self._lengths.refresh(islice(self._waiting, LOOK_AHEAD))
        for _, group in groupby(tuple(self._waiting), key=lambda s: s.priority):
            equals = list(group)
            compared = [sequence for sequence in equals[:LOOK_AHEAD] if sequence not in self._interrupted]
            yield from (sequence for sequence in equals[:LOOK_AHEAD] if sequence in self._interrupted)
            if compared and self._age.is_due(compared[0]):
                yield compared.pop(0)
            yield from sorted(compared, key=lambda s: -self._lengths.of(s))
            yield from equals[LOOK_AHEAD:]

    def put_back(self, sequence: Sequence) -> None:
        super().put_back(sequence)
        self._interrupted.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._age.leaves(sequence, self._oldest_of(sequence))
        super().remove(sequence)
        self._lengths.forget(sequence)
        self._interrupted.discard(sequence)

    def replace(self, sequence: Sequence, heir: Sequence) -> None:
        super().replace(sequence, heir)
        self._lengths.forget(sequence)
        if sequence in self._interrupted:
            self._interrupted.remove(sequence)
            self._interrupted.add(heir)

    def _oldest_of(self, sequence: Sequence) -> Sequence:
        """Of its priority, of those that never ran; itself where there is none."""
        if sequence in self._interrupted:
            return sequence
        equals = (s for s in self._waiting if s.priority == sequence.priority)
        return next(s for s in equals if s not in self._interrupted)
