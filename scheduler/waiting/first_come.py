"""First come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from ..types import Sequence
from .base import WaitingQueue

LOOK_AHEAD = 256  # waiting sequences that are looked at without being let in


class FirstComeQueue(WaitingQueue):
    """By priority, the oldest first among equals. A short prompt may pass long ones of its priority."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()

    def offers(self) -> Iterator[Sequence]:
        return iter(tuple(self._waiting))

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
        self._waiting.insert(next(before, len(self._waiting)), sequence)

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)

    def replace(self, sequence: Sequence, heir: Sequence) -> None:
        self._waiting[self._waiting.index(sequence)] = heir

    def may_pass(self, blocked: Sequence, sequence: Sequence) -> bool:
        return sequence.priority == blocked.priority

    def holds_back(self, running: Sequence, sequence: Sequence) -> bool:
        return running.priority <= sequence.priority

    def short_rivals(self, _running: Sequence) -> Iterable[Sequence]:
        return islice(self._waiting, LOOK_AHEAD)
