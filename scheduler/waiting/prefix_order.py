"""What queues that prefer cached prefixes know of those who wait."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.block_manager import BlockManager

from ..types import Sequence
from .cached_lengths import CachedLengths

MAX_OVERTAKEN = 32
"""Younger ones that are let in before the oldest: so the k-th oldest waits for no more than 32 k others."""


class PrefixOrder:
    """First those that had to give their pages back, then the oldest if it has been overtaken
    ``MAX_OVERTAKEN`` times, then those with most in the prefix cache.

    lengths   estimates of what is cached
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.lengths = CachedLengths(blocks)
        self._interrupted: set[Sequence] = set()
        self._overtaken: dict[Sequence, int] = {}  # while it was the oldest

    def rank(self, equals: Iterable[Sequence]) -> list[tuple[int, int, Sequence]]:
        """Each of these, who wait with equal rights, with its place: smaller ones first, and among equals
        the order given, which is that of age."""
        equals = list(equals)
        oldest = self._oldest(equals)
        due = oldest is not None and self._overtaken.get(oldest, 0) >= MAX_OVERTAKEN
        return [
            (
                0 if each in self._interrupted else 1 if due and each is oldest else 2,
                -self.lengths.of(each),
                each,
            )
            for each in equals
        ]

    def interrupt(self, sequence: Sequence) -> None:
        """It ran and has to wait again."""
        self._interrupted.add(sequence)

    def leaves(self, sequence: Sequence, equals: Iterable[Sequence]) -> None:
        """One of ``equals`` waits no more."""
        if sequence in self._interrupted:
            self._interrupted.remove(sequence)
        else:
            oldest = self._oldest(equals)
            if oldest is not None and oldest is not sequence:
                self._overtaken[oldest] = self._overtaken.get(oldest, 0) + 1
            self._overtaken.pop(sequence, None)
        self.lengths.forget(sequence)

    def replace(self, sequence: Sequence, heir: Sequence) -> None:
        """``heir`` takes the place of a sequence that waits, and its age."""
        self.lengths.forget(sequence)
        if sequence in self._interrupted:
            self._interrupted.remove(sequence)
            self._interrupted.add(heir)
        if (overtaken := self._overtaken.pop(sequence, None)) is not None:
            self._overtaken[heir] = overtaken

    def _oldest(self, equals: Iterable[Sequence]) -> Sequence | None:
        """Of those that never ran."""
        return next((each for each in equals if each not in self._interrupted), None)
