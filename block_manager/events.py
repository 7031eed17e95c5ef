"""What became findable and what no longer is, in order: for watchers, routers and metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Run
from typing import Literal, NamedTuple

from octavo.block_manager.types import Digest


class EventsLost(ValueError):
    """The log does not reach from there to here; begin again with what is cached now."""


class PageEvent(NamedTuple):
    """number    1, 2, 3, ... without gaps
    kind      stored     these pages can be found from now on
              removed    these can be no longer
              cleared    nothing can be found any more
    digests   of the pages, for ``stored`` in the order of the sequence
    parent    for ``stored``: digest of the page before the first one, None at a sequence's start
    """

    number: int
    kind: Literal["stored", "removed", "cleared"]
    digests: Run[Digest] = ()
    parent: Digest | None = None


class EventLog:
    """The latest events, at most ``capacity`` of them with at most ``capacity`` digests; the newest
    one is always kept. One event per run of pages, O(1) per page."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._events: deque[PageEvent] = deque()
        self._num_digests = 0
        self._next = 1

    @property
    def next_number(self) -> int:
        """Number of the event that comes next: where a watcher of the future begins."""
        return self._next

    def add(
        self,
        kind: Literal["stored", "removed", "cleared"],
        digests: Run[Digest] = (),
        parent: Digest | None = None,
    ) -> None:
        """Append an event. The caller gives ``digests`` away."""
        events = self._events
        events.append(PageEvent(self._next, kind, digests, parent))
        self._next += 1
        self._num_digests += len(digests)
        while len(events) > 1 and max(len(events), self._num_digests) > self._capacity:
            self._num_digests -= len(events.popleft().digests)

    def since(self, number: int) -> list[PageEvent]:
        """The events from ``number`` on; EventsLost if some of them are gone, or it is yet to come."""
        first = self._next - len(self._events)
        if not first <= number <= self._next:
            raise EventsLost(
                f"events {first} to {self._next - 1} are kept, got {number}; "
                f"watch from {self._next} on after reading what is cached"
            )
        if number == self._next:
            return []
        return [event for event in self._events if event.number >= number]
