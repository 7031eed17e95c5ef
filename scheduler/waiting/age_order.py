"""The order among those who wait with equal rights, which lets nobody wait for ever."""

from __future__ import annotations

from collections.abc import Iterable, Set

from ..types import Sequence

MAX_OVERTAKEN = 32
"""Younger ones that are let in before the oldest, and those let in with the last of these: the k-th oldest
waits for no more than (32 + max_running) k others, see docs/guides/latency-targets.md."""


class AgeOrder:
    """First those that had to give their pages back, then the oldest if it has been overtaken
    ``MAX_OVERTAKEN`` times, then the others, and last those that are late: they give way to whoever can
    still be in time.

    late   can no longer have their first token when it is wanted; none of them ran before
    """

    def __init__(self) -> None:
        self.late: Set[Sequence] = frozenset()
        self._interrupted: set[Sequence] = set()
        self._overtaken: dict[Sequence, int] = {}  # while it was the oldest

    def rank(self, equals: Iterable[Sequence]) -> list[tuple[int, int, Sequence]]:
        """Each of these, who wait with equal rights, with its place: smaller ones first, and among equals
        the order given, which is that of age."""
        equals = list(equals)
        oldest = self._oldest(equals)
        due = oldest if oldest is not None and self._overtaken.get(oldest, 0) >= MAX_OVERTAKEN else None
        return [(self._place(each, due), self._preference(each), each) for each in equals]

    def in_order(self, equals: Iterable[Sequence]) -> list[Sequence]:
        """These, who wait with equal rights, by rank."""
        return [each for _, _, each in sorted(self.rank(equals), key=lambda rank: rank[:2])]

    def interrupt(self, sequence: Sequence) -> None:
        """It ran and has to wait again."""
        self._interrupted.add(sequence)

    def leaves(self, sequence: Sequence, equals: Iterable[Sequence]) -> None:
        """One of ``equals`` waits no more."""
        if sequence in self._interrupted:
            self._interrupted.remove(sequence)
            return
        oldest = self._oldest(equals)
        if oldest is not None and oldest is not sequence:
            self._overtaken[oldest] = self._overtaken.get(oldest, 0) + 1
        self._overtaken.pop(sequence, None)

    def replace(self, sequence: Sequence, successor: Sequence) -> None:
        """``successor`` takes the place of a sequence that waits, and its age."""
        if sequence in self._interrupted:
            self._interrupted.remove(sequence)
            self._interrupted.add(successor)
        if (overtaken := self._overtaken.pop(sequence, None)) is not None:
            self._overtaken[successor] = overtaken

    def _place(self, sequence: Sequence, due: Sequence | None) -> int:
        if sequence in self._interrupted:
            return 0
        if sequence is due:
            return 1
        return 3 if sequence in self.late else 2

    def _preference(self, _sequence: Sequence) -> int:
        """Among those of one place, smaller ones first."""
        return 0

    def _oldest(self, equals: Iterable[Sequence]) -> Sequence | None:
        """Of those that never ran."""
        return next((each for each in equals if each not in self._interrupted), None)
