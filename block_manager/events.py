"""What became findable and what no longer is, in order: for watchers, routers and metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Run
from itertools import islice
from typing import Literal, NamedTuple

from .types import Digest

MOST_DIGESTS = 4096  # of one event of removed pages: larger ones do not fit into a message


class EventsLost(ValueError):
    """The log does not reach from there to here; begin again with what is cached now."""


class PageEvent(NamedTuple):
    """number    1, 2, 3, ... without gaps
    kind      stored     these pages can be found from now on
              removed    these can be no longer
              cleared    nothing can be found any more
    digests   of the pages, for ``stored`` in the order of the sequence
    parent    for ``stored``: digest of the page before the first one, None at a sequence's start
    salt      for ``stored``: of the sequence
    contents  for ``stored``, while tokens are kept: each page's tokens as from ``digests.pack``
    """

    number: int
    kind: Literal["stored", "removed", "cleared"]
    digests: Run[Digest] = ()
    parent: Digest | None = None
    salt: bytes = b""
    contents: Run[bytes] = ()


class PageContents(NamedTuple):
    """What a page that can be found holds: its own tokens (packed), after those of ``parent``."""

    tokens: bytes
    parent: Digest | None
    salt: bytes


class EventLog:
    """The latest events, at most ``capacity`` of them with at most ``capacity`` digests; the newest
    one is always kept. One event per run of pages, O(1) per page.

    Tokens are kept from ``keep_tokens`` on, which costs time at every page that is published:
    in the events, and of pages that can be found.

    tokens_since   number of the first event with tokens; None while they are not kept
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._events: deque[PageEvent] = deque()
        self._num_digests = 0
        self._next = 1
        self._contents: dict[Digest, PageContents] = {}
        self.tokens_since: int | None = None

    @property
    def next_number(self) -> int:
        """Number of the event that comes next: where a watcher of the future begins."""
        return self._next

    @property
    def contents(self) -> Mapping[Digest, PageContents]:
        """Of the pages that can be found and were published since tokens are kept."""
        return self._contents

    def keep_tokens(self) -> None:
        """From now on, for good: somebody wants to know what is in the pages."""
        if self.tokens_since is None:
            self.tokens_since = self._next

    def add_stored(
        self, digests: Run[Digest], parent: Digest | None, salt: bytes = b"", contents: Run[bytes] = ()
    ) -> None:
        """Pages of one sequence can be found. The caller gives ``digests`` away."""
        self._append(PageEvent(self._next, "stored", digests, parent, salt, contents))
        for digest, tokens in zip(digests, contents, strict=False):  # without tokens there are none
            self._contents[digest] = PageContents(tokens, parent, salt)
            parent = digest

    def add_removed(self, digests: Run[Digest]) -> None:
        """These pages can be found no longer. The caller gives ``digests`` away."""
        for start in range(0, len(digests), MOST_DIGESTS):
            part = digests[start : start + MOST_DIGESTS] if len(digests) > MOST_DIGESTS else digests
            self._append(PageEvent(self._next, "removed", part))
        if self._contents:
            for digest in digests:
                self._contents.pop(digest, None)

    def add_cleared(self) -> None:
        """Nothing can be found any more."""
        self._append(PageEvent(self._next, "cleared"))
        self._contents.clear()

    def _append(self, event: PageEvent) -> None:
        events = self._events
        events.append(event)
        self._next += 1
        self._num_digests += len(event.digests)
        while len(events) > 1 and max(len(events), self._num_digests) > self._capacity:
            self._num_digests -= len(events.popleft().digests)

    def since(self, number: int, limit: int | None = None) -> list[PageEvent]:
        """The events from ``number`` on, the first ``limit`` of them; EventsLost if some of them are
        gone, or it is yet to come."""
        first = self._next - len(self._events)
        if not first <= number <= self._next:
            raise EventsLost(
                f"events {first} to {self._next - 1} are kept, got {number}; "
                f"watch from {self._next} on after reading what is cached"
            )
        latest = list(islice(reversed(self._events), self._next - number))  # the deque's near end
        latest.reverse()
        return latest if limit is None else latest[:limit]

    def chains(self) -> Iterator[tuple[Digest, PageContents]]:
        """Every page of ``contents`` whose whole prefix is there, parents before children."""
        return parents_first(self._contents)


def parents_first(contents: Mapping[Digest, PageContents]) -> Iterator[tuple[Digest, PageContents]]:
    """Every page whose whole prefix is in ``contents``, parents before children."""
    done = set[Digest]()
    for digest in contents:
        chain: list[Digest] = []
        at: Digest | None = digest
        while at is not None and at not in done and at in contents:
            chain.append(at)
            at = contents[at].parent
        if at is not None and at not in done:
            continue  # its beginning was evicted, or came before tokens were kept
        for known in reversed(chain):
            done.add(known)
            yield known, contents[known]
