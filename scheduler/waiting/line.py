from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import chain, islice
from operator import itemgetter

from ..types import Sequence

MAX_OVERTAKEN = 32
"""After this many younger sequences were admitted before the oldest sequence, or before preempted ones, the
overtaken sequences come first. A single step may exceed this by as many sequences as run at once."""

HARD_MAX_OVERTAKEN = 256
"""The oldest sequence may come first and still not be admitted, for example because a long prompt is being
computed. After this many younger sequences were admitted before it, no sequence may pass it. Otherwise the
memory that it needs might never become free. docs/design/latency-bounds.md and preemption-bounds.md derive
bounds from MAX_OVERTAKEN and HARD_MAX_OVERTAKEN."""

Rank = tuple[int, int, Sequence]


class Line:
    """Waiting sequences of one priority and tenant: preempted ones, then the others by age."""

    def __init__(self) -> None:
        self._ran: list[Sequence] = []
        self._new: deque[Sequence] = deque()

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._ran, self._new)

    def __bool__(self) -> bool:
        return bool(self._ran or self._new)

    def append(self, sequence: Sequence) -> None:
        self._new.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        before = sequence.history.num_admitted_before
        index = sum(each.history.num_admitted_before < before for each in self._ran)
        self._ran.insert(index, sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._ran:
            self._ran.remove(sequence)
            if self._ran:
                first = self._ran[0].history
                first.num_overtaken = max(first.num_overtaken, sequence.history.num_overtaken)
            return
        if self._ran:
            self._ran[0].history.num_overtaken = 1 + self._times_overtaken()
        if self._new[0] is not sequence:
            self._new[0].history.num_overtaken += 1
        self._new.remove(sequence)

    def replace(self, sequence: Sequence, successor: Sequence) -> None:
        """Let ``successor`` take the place and age of a waiting sequence."""
        part = self._ran if sequence in self._ran else self._new
        part[part.index(sequence)] = successor

    def may_overtake(self, sequence: Sequence) -> bool:
        """Return whether ``sequence`` may be admitted before an earlier one that must wait."""
        if self._ran and self._times_overtaken() >= MAX_OVERTAKEN:
            return False
        oldest = self._new[0] if self._new else sequence
        return oldest is sequence or oldest.history.num_overtaken < HARD_MAX_OVERTAKEN

    def ranks(self, num: int, late: Set[Sequence], num_cached: Callable[[Sequence], int]) -> list[Rank]:
        """Return the ranks of the first ``num`` sequences.

        Preempted sequences come first. Next is the oldest sequence if it has been overtaken ``MAX_OVERTAKEN``
        times. Then come the others, most cached tokens first, and those that will miss their deadline.
        """
        ran = self._ran[:num]
        ranks: list[Rank] = [(0, 0, each) for each in ran]
        for each in islice(self._new, num - len(ran)):
            if each is self._new[0] and each.history.num_overtaken >= MAX_OVERTAKEN:
                ranks.append((1, 0, each))
            else:
                ranks.append((3 if each in late else 2, -num_cached(each), each))
        return ranks

    def _times_overtaken(self) -> int:
        return max(each.history.num_overtaken for each in self._ran)


def in_order(ranks: Iterable[Rank]) -> list[Sequence]:
    return [sequence for _, _, sequence in sorted(ranks, key=itemgetter(0, 1))]
