"""First come, first served, or longest cached prefix first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby, islice

from octavo.block_manager import BlockManager

from ..types import Sequence
from .age_order import AgeOrder
from .base import WaitingQueue

LOOK_AHEAD = 256  # waiting sequences that are looked at without being let in


class FirstComeQueue(WaitingQueue):
    """By priority, the oldest first among equals, but those that are late after the others; see ``AgeOrder``.

    A short prompt may pass long ones of its priority.

    blocks   of the prefix cache: those with most in it come first, so that it is used before it is evicted.
             Only the first ``LOOK_AHEAD`` of a priority are compared (None: the oldest come first)
    """

    def __init__(self, blocks: BlockManager | None = None) -> None:
        super().__init__(AgeOrder(blocks))
        self._waiting: deque[Sequence] = deque()

    def offers(self) -> Iterator[Sequence]:
        lengths = self._order.lengths
        if lengths is not None:
            lengths.refresh(islice(self._waiting, LOOK_AHEAD))
        return self._by_rank() if lengths is not None or self._order.late else iter(tuple(self._waiting))

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._waiting

    def append(self, sequence: Sequence) -> None:
        index = len(self._waiting)
        while index and self._waiting[index - 1].priority > sequence.priority:
            index -= 1
        self._waiting.insert(index, sequence)

    def put_back(self, sequence: Sequence) -> None:
        before = (i for i, s in enumerate(self._waiting) if s.priority >= sequence.priority)
        index = next(before, len(self._waiting))
        self._waiting.insert(index + self._order.num_before(sequence, self._equals(sequence)), sequence)
        self._order.interrupt(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._order.leaves(sequence, self._equals(sequence))
        self._waiting.remove(sequence)

    def replace(self, sequence: Sequence, successor: Sequence) -> None:
        self._waiting[self._waiting.index(sequence)] = successor
        self._order.replace(sequence, successor)

    def may_pass(self, blocked: Sequence, sequence: Sequence) -> bool:
        return sequence.priority == blocked.priority and self._order.may_pass(
            sequence, self._equals(sequence)
        )

    def holds_back(self, running: Sequence, sequence: Sequence) -> bool:
        return running.priority <= sequence.priority

    def short_rivals(self, _running: Sequence) -> Iterable[Sequence]:
        return islice(self._waiting, LOOK_AHEAD)

    def _equals(self, sequence: Sequence) -> Iterator[Sequence]:
        return (other for other in self._waiting if other.priority == sequence.priority)

    def _by_rank(self) -> Iterator[Sequence]:
        """Of each priority the first ``LOOK_AHEAD`` in their order, and the others behind them."""
        for _, group in groupby(tuple(self._waiting), key=lambda s: s.priority):
            equals = list(group)
            yield from self._order.in_order(equals[:LOOK_AHEAD])
            yield from equals[LOOK_AHEAD:]
