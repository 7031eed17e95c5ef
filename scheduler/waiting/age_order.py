"""The order among those who wait with equal rights, which lets nobody wait for ever."""

from __future__ import annotations

from collections.abc import Iterable, Set

from octavo.block_manager import BlockManager

from ..types import Sequence
from .cached_lengths import CachedLengths

MAX_OVERTAKEN = 32
"""Younger ones that are let in before the oldest, or before those that gave their pages back: then these come
first. Those let in with the last of them may be as many more as run at once."""

MAX_PASSED = 256
"""The same where the oldest comes first and cannot be let in yet: for a long prompt that is under way, say.
Then nobody passes it any more, or the room it needs might never be free. Bounds that follow from both:
docs/design/latency-bounds.md and docs/design/preemption-bounds.md."""


class AgeOrder:
    """Order by age, of those that wait.

    First come those that had to give their pages back, then the oldest if it has been overtaken
    ``MAX_OVERTAKEN`` times, then the others, and last those that are late: they give way to whoever can still
    be in time. With a prefix cache, those of one place are ordered by what is cached of them, most first.

    lengths   estimates of what is cached; None: it does not matter
    late   can no longer have their first token when it is wanted; none of them ran before
    """

    def __init__(self, blocks: BlockManager | None = None) -> None:
        """Begin without sequences. ``blocks``: of the prefix cache that counts, if any does."""
        self.lengths = None if blocks is None else CachedLengths(blocks)
        self.late: Set[Sequence] = frozenset()
        self._interrupted: set[Sequence] = set()

    def rank(self, equals: Iterable[Sequence]) -> list[tuple[int, int, Sequence]]:
        """Each of these, who wait with equal rights, with its place.

        Smaller ones first, and among equals the order given: those that ran before by age, then the others by
        age."""
        equals = list(equals)
        _, oldest = self._first_ones(equals)
        due = oldest if oldest is not None and oldest.history.num_overtaken >= MAX_OVERTAKEN else None
        return [self._rank(each, due) for each in equals]

    def in_order(self, equals: Iterable[Sequence]) -> list[Sequence]:
        """These, who wait with equal rights, by rank."""
        return [each for _, _, each in sorted(self.rank(equals), key=lambda rank: rank[:2])]

    def interrupt(self, sequence: Sequence) -> None:
        """It ran and has to wait again."""
        self._interrupted.add(sequence)

    def num_before(self, sequence: Sequence, equals: Iterable[Sequence]) -> int:
        """How many of ``equals`` come before one that ran and has to wait again.

        Those that ran, too, and were let in before it was, for the first time."""
        ran, _ = self._first_ones(equals)
        return sum(each.history.num_admitted_before < sequence.history.num_admitted_before for each in ran)

    def may_pass(self, sequence: Sequence, equals: Iterable[Sequence]) -> bool:
        """Whether one of ``equals`` may be let in though another one, which comes before it, has to wait."""
        ran, oldest = self._first_ones(equals)
        if ran and _times_overtaken(ran) >= MAX_OVERTAKEN:
            return False
        return oldest is None or oldest is sequence or oldest.history.num_overtaken < MAX_PASSED

    def leaves(self, sequence: Sequence, equals: Iterable[Sequence]) -> None:
        """One of ``equals`` waits no more."""
        if self.lengths is not None:
            self.lengths.forget(sequence)
        ran, oldest = self._first_ones(equals)
        if sequence in self._interrupted:
            self._interrupted.remove(sequence)
            others = [each for each in ran if each is not sequence]
            if others:  # they are overtaken together
                others[0].history.num_overtaken = max(
                    others[0].history.num_overtaken, sequence.history.num_overtaken
                )
            return
        if ran:
            ran[0].history.num_overtaken = 1 + _times_overtaken(ran)
        if oldest is not None and oldest is not sequence:
            oldest.history.num_overtaken += 1

    def replace(self, sequence: Sequence, successor: Sequence) -> None:
        """``successor`` takes the place of a sequence that waits, and its age."""
        if self.lengths is not None:
            self.lengths.forget(sequence)
        if sequence in self._interrupted:
            self._interrupted.remove(sequence)
            self._interrupted.add(successor)

    def _rank(self, sequence: Sequence, due: Sequence | None) -> tuple[int, int, Sequence]:
        if sequence in self._interrupted:
            return 0, 0, sequence
        if sequence is due:
            return 1, 0, sequence
        return 3 if sequence in self.late else 2, self._preference(sequence), sequence

    def _preference(self, sequence: Sequence) -> int:
        """Among those that never ran, smaller ones first."""
        return 0 if self.lengths is None else -self.lengths.of(sequence)

    def _first_ones(self, equals: Iterable[Sequence]) -> tuple[list[Sequence], Sequence | None]:
        """Those that ran before, who are the first of ``equals``, and the oldest of those that never ran."""
        ran: list[Sequence] = []
        for each in equals:
            if each not in self._interrupted:
                return ran, each
            ran.append(each)
        return ran, None


def _times_overtaken(ran: Iterable[Sequence]) -> int:
    """By those that never ran, since one of these, or of those that waited with them, has been waiting."""
    return max(each.history.num_overtaken for each in ran)
