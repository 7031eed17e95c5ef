"""Log of pages that were cached or evicted, in order, for watchers, routers and metrics."""

from __future__ import annotations

from collections import abc, deque
from itertools import islice
from typing import Literal, NamedTuple

from .types import Digest

MAX_DIGESTS = 4096  # most digests in one ``removed`` event; more would not fit into a message


class EventsLost(ValueError):
    """Some of the requested events are no longer in the log; a watcher must list the cached pages anew."""


class PageEvent(NamedTuple):
    """A change of the set of cached pages.

    number    1, 2, 3, ... without gaps
    kind      stored     these pages are cached from now on
              removed    these pages are no longer cached
              cleared    no page is cached any more
    digests   digests of the pages, for ``stored`` in the order of the sequence
    parent    for ``stored``: digest of the page before the first one, None at a sequence's start
    salt      for ``stored``: salt of the sequence
    contents  for ``stored``, after ``keep_tokens``: each page's ``digests.page_contents``; otherwise empty
    salts     for ``removed``: salt of each page's sequence; empty if no page had a salt
    """

    number: int
    kind: Literal["stored", "removed", "cleared"]
    digests: abc.Sequence[Digest] = ()
    parent: Digest | None = None
    salt: bytes = b""
    contents: abc.Sequence[bytes] = ()
    salts: abc.Sequence[bytes] = ()

    def digests_of(self, salt_prefix: bytes) -> abc.Sequence[Digest]:
        """Return the digests of pages whose salts begin with ``salt_prefix``, which their owner may see."""
        if self.kind == "stored":
            return self.digests if self.salt.startswith(salt_prefix) else ()
        if not salt_prefix:
            return self.digests
        own = zip(self.digests, self.salts, strict=False)  # without salts, no page has an owner
        return [digest for digest, salt in own if salt.startswith(salt_prefix)]


class EventLog:
    """The latest events, at most ``capacity`` of them with at most ``capacity`` digests.

    The newest event is always kept. There is one event per run of pages, with O(1) work per page. Events
    contain tokens only after ``keep_tokens`` was called; see ``BlockManager.keep_tokens``.

    tokens_since   number of the first event with tokens; None before ``keep_tokens``
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._events: deque[PageEvent] = deque()
        self._num_digests = 0
        self._next = 1
        self._salts: dict[Digest, bytes] = {}  # salts of cached pages that have one
        self.tokens_since: int | None = None

    @property
    def next_number(self) -> int:
        """Number of the next event, from which a new watcher begins."""
        return self._next

    def keep_tokens(self) -> None:
        """Record that callers pass page contents to ``add_stored`` from now on."""
        if self.tokens_since is None:
            self.tokens_since = self._next

    def add_stored(
        self,
        digests: abc.Sequence[Digest],
        parent: Digest | None,
        salt: bytes = b"",
        contents: abc.Sequence[bytes] = (),
    ) -> None:
        """Log pages of one sequence that became cached. The log takes ownership of ``digests``."""
        row = (self._next, "stored", digests, parent, salt, contents, ())
        self._append(tuple.__new__(PageEvent, row))  # the constructor takes twice as long
        if salt:
            self._salts.update(dict.fromkeys(digests, salt))

    def add_removed(self, digests: abc.Sequence[Digest]) -> None:
        """Log pages that are no longer cached. The log takes ownership of ``digests``."""
        for start in range(0, len(digests), MAX_DIGESTS):
            part = digests[start : start + MAX_DIGESTS] if len(digests) > MAX_DIGESTS else digests
            self._append(PageEvent(self._next, "removed", part, salts=self._forget_salts(part)))

    def _forget_salts(self, digests: abc.Sequence[Digest]) -> abc.Sequence[bytes]:
        """Return and drop the salts of these pages."""
        if not self._salts:
            return ()
        pop = self._salts.pop
        return [pop(digest, b"") for digest in digests]

    def add_cleared(self) -> None:
        """Log that no page is cached any more."""
        self._append(PageEvent(self._next, "cleared"))

    def _append(self, event: PageEvent) -> None:
        events, capacity = self._events, self._capacity
        events.append(event)
        self._next += 1
        self._num_digests += len(event.digests)
        while (len(events) > capacity or self._num_digests > capacity) and len(events) > 1:
            self._num_digests -= len(events.popleft().digests)

    def since(self, number: int, limit: int | None = None) -> list[PageEvent]:
        """Return the first ``limit`` events from ``number`` on.

        Raises EventsLost if some of them are gone, or ``number`` is in the future.
        """
        first = self._next - len(self._events)
        if not first <= number <= self._next:
            raise EventsLost(
                f"events {first} to {self._next - 1} are available, got {number}; watch from {self._next} "
                "on after reading what is cached"
            )
        latest = list(islice(reversed(self._events), self._next - number))  # watchers read the newest
        latest.reverse()
        return latest if limit is None else latest[:limit]
