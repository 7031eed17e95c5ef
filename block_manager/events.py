from __future__ import annotations

from collections import abc, deque
from itertools import islice
from typing import Literal, NamedTuple

from .types import Digest

MAX_DIGESTS = 4096  # most digests in one ``removed`` event


class EventsLost(ValueError):
    """Requested events are no longer in the log; list the cached pages again."""


class PageEvent(NamedTuple):
    """A change of the set of cached pages.

    kind      ``stored`` (pages became cached), ``removed`` or ``cleared`` (no page is cached)
    parent    for ``stored``: digest before the first page; None at a sequence's start
    contents  for ``stored``: tokens and images of each page; empty before ``keep_tokens``
    salts     for ``removed``: salt of each page; empty if all salts are empty
    """

    number: int
    kind: Literal["stored", "removed", "cleared"]
    digests: abc.Sequence[Digest] = ()
    parent: Digest | None = None
    salt: bytes = b""
    contents: abc.Sequence[bytes] = ()
    salts: abc.Sequence[bytes] = ()

    def digests_of(self, salt_prefix: bytes) -> abc.Sequence[Digest]:
        """Return the digests of pages whose salts begin with ``salt_prefix``."""
        if self.kind == "stored":
            return self.digests if self.salt.startswith(salt_prefix) else ()
        if not salt_prefix:
            return self.digests
        own = zip(self.digests, self.salts, strict=False)
        return [digest for digest, salt in own if salt.startswith(salt_prefix)]


class EventLog:
    """The latest cache events, at most ``capacity`` of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._events: deque[PageEvent] = deque()
        self._num_digests = 0
        self._next = 1
        self._salts: dict[Digest, bytes] = {}
        self.tokens_since: int | None = None

    @property
    def next_number(self) -> int:
        return self._next

    def keep_tokens(self) -> None:
        if self.tokens_since is None:
            self.tokens_since = self._next

    def add_stored(
        self,
        digests: abc.Sequence[Digest],
        parent: Digest | None,
        salt: bytes = b"",
        contents: abc.Sequence[bytes] = (),
    ) -> None:
        self._append(PageEvent(self._next, "stored", digests, parent, salt, contents))
        if salt:
            self._salts.update(dict.fromkeys(digests, salt))

    def add_removed(self, digests: abc.Sequence[Digest]) -> None:
        for start in range(0, len(digests), MAX_DIGESTS):
            part = digests[start : start + MAX_DIGESTS] if len(digests) > MAX_DIGESTS else digests
            self._append(PageEvent(self._next, "removed", part, salts=self._forget_salts(part)))

    def _forget_salts(self, digests: abc.Sequence[Digest]) -> abc.Sequence[bytes]:
        if not self._salts:
            return ()
        pop = self._salts.pop
        return [pop(digest, b"") for digest in digests]

    def add_cleared(self) -> None:
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

        Raises EventsLost if the log does not have them all.
        """
        first = self._next - len(self._events)
        if not first <= number <= self._next:
            raise EventsLost(
                f"events {first} to {self._next - 1} are available, got {number}; read what is cached, then "
                f"watch from {self._next}"
            )
        latest = list(islice(reversed(self._events), self._next - number))
        latest.reverse()
        return latest if limit is None else latest[:limit]
