"""Why the prefix cache did not have a page: bounded memory of what it once had."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as Run
from dataclasses import dataclass

from octavo.block_manager.types import Digest


@dataclass(frozen=True, slots=True)
class Miss:
    """The first page of a prompt that was not found.

    page         its index in the prompt
    reason       disabled       the cache is off, or was not to be used for this prompt
                 new            never seen, or so long ago that it is forgotten
                 evicted        given up for another page
                 other_salt     the prompt begins with a page that was written under another salt
                 last_token     the page would be full, but it has the last token, which is always computed
                 partial_page   the tail does not fill a page
    evicted_at   for ``evicted``: when, in seconds of the block manager's clock
    other_salts  for ``other_salt``: some of those it was written under. Whoever has one of them may
                 know of it, nobody else: that there is such a page says what somebody has sent
    """

    page: int
    reason: str
    evicted_at: float | None = None
    other_salts: tuple[bytes, ...] = ()


class Evictions:
    """When digests were evicted last, of at least the ``capacity`` latest evictions."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._latest: dict[Digest, int] = {}  # number of the run it was last evicted with
        self._runs: deque[tuple[float, Run[Digest]]] = deque()
        self._first = 0  # number of the oldest run
        self._size = 0  # digests in all runs

    def add(self, digests: Run[Digest], now: float) -> None:
        self._latest.update(dict.fromkeys(digests, self._first + len(self._runs)))
        self._runs.append((now, digests))
        self._size += len(digests)
        while self._size - len(self._runs[0][1]) >= self._capacity:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, digests = self._runs.popleft()
        latest, number = self._latest, self._first
        for digest in digests:
            if latest.get(digest) == number:
                del latest[digest]
        self._size -= len(digests)
        self._first += 1

    def when(self, digest: Digest) -> float | None:
        number = self._latest.get(digest)
        return None if number is None else self._runs[number - self._first][0]


class FirstPages:
    """Under which salts a first page was written, of the ``capacity`` latest ones. Equal tokens under
    another salt never match; that they exist is for the operator's eyes, not for a tenant's."""

    SALTS = 2  # enough to know that there is another one

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._salts: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()

    def add(self, packed: bytes, salt: bytes) -> None:
        """``packed``: tokens of the page, as from ``digests.pack``."""
        known = self._salts.pop(packed, ())
        self._salts[packed] = known if salt in known else (*known, salt)[-self.SALTS :]
        if len(self._salts) > self._capacity:
            self._salts.popitem(last=False)

    def others(self, packed: bytes, salt: bytes) -> tuple[bytes, ...]:
        return tuple(known for known in self._salts.get(packed, ()) if known != salt)
