"""Why the prefix cache did not have a page: bounded memory of what it once had."""

from __future__ import annotations

from collections import OrderedDict, abc, deque
from dataclasses import dataclass

from .digests import pack
from .types import Digest, PageTable


@dataclass(frozen=True, slots=True)
class Miss:
    """The first page of a prompt that was not found.

    page         its index in the prompt
    reason       disabled       the cache is off, or was not to be used for this prompt
                 new            never seen, or so long ago that it is forgotten
                 evicted        given up for another page
                 no_state       the page is there, and no snapshot of the recurrent state after any page from
                                there on: ``num_pages`` pages were found
                 other_format   kept outside the pool, in a format or by a model that is not this one's
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
    num_pages: int = 0
    other_salts: tuple[bytes, ...] = ()


class Evictions:
    """When digests were evicted last, of at least the ``capacity`` latest evictions.

    They are noted a run at a time, and indexed when somebody asks: where nobody does, an
    eviction costs nothing per page.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._latest: dict[Digest, int] = {}  # number of the run it was last evicted with
        self._runs: deque[tuple[float, abc.Sequence[Digest]]] = deque()
        self._first = 0  # number of the oldest run
        self._indexed = 0  # the runs before this number are in ``_latest``
        self._size = 0  # digests in all runs

    def add(self, digests: abc.Sequence[Digest], now: float) -> None:
        self._runs.append((now, digests))
        self._size += len(digests)
        while self._size - len(self._runs[0][1]) >= self._capacity:
            self._forget_oldest()

    def when(self, digest: Digest) -> float | None:
        self._index()
        number = self._latest.get(digest)
        return None if number is None else self._runs[number - self._first][0]

    def _forget_oldest(self) -> None:
        _, digests = self._runs.popleft()
        latest, number = self._latest, self._first
        if number < self._indexed:
            for digest in digests:
                if latest.get(digest) == number:
                    del latest[digest]
        self._size -= len(digests)
        self._first += 1

    def _index(self) -> None:
        end = self._first + len(self._runs)
        for number in range(max(self._indexed, self._first), end):
            self._latest.update(dict.fromkeys(self._runs[number - self._first][1], number))
        self._indexed = end


class FirstPages:
    """Under which salts a first page was written, of the ``capacity`` latest ones.

    Equal tokens under another salt never match; that they exist is for the operator's eyes, not for a
    tenant's."""

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


class MissClassifier:
    """Why pages were not found, of the ``capacity`` latest that were evicted or came first.

    evicted           when a page of these digests was evicted without which nobody goes on after so
                      many pages; None if none was
    in_other_format   whether a page is kept outside the pool, and not in a form this pool can take
    """

    def __init__(
        self, page_size: int, capacity: int, *, evicted: abc.Callable[[PageTable, int], float | None]
    ) -> None:
        self._page_size = page_size
        self._first_pages = FirstPages(capacity)
        self._evicted = evicted
        self.in_other_format: abc.Callable[[Digest], bool] = _nowhere

    def first_page(self, tokens: abc.Sequence[int], salt: bytes) -> None:
        """A sequence's first page was written."""
        self._first_pages.add(pack(tokens[: self._page_size]), salt)

    def explain(self, table: PageTable, tokens: abc.Sequence[int]) -> Miss:
        """Why a table that was just opened for these tokens has what it has and no more."""
        num_tokens, page = len(tokens), table.num_written // self._page_size
        if page == max(num_tokens - 1, 0) // self._page_size:
            return Miss(page, self._tail_reason(num_tokens - page * self._page_size))
        if table.state is not None and table.state.junction > page:
            return Miss(page, "no_state", num_pages=table.state.junction)
        evicted_at = self._evicted(table, page + 1)
        if evicted_at is not None:
            return Miss(page, "evicted", evicted_at)
        if self.in_other_format(table.digests[page]):
            return Miss(page, "other_format")
        others = () if page else self._first_pages.others(pack(tokens[: self._page_size]), table.salt)
        return Miss(page, "other_salt" if others else "new", other_salts=others)

    def count(self, num_tokens: int, miss: Miss) -> dict[str, int]:
        """Tokens that were not found, by reason.

        Those after the first page that could have been found and was not have its reason, for without it they
        are not looked for."""
        if miss.reason == "disabled":
            return {"disabled": num_tokens}
        findable = max(num_tokens - 1, 0) // self._page_size * self._page_size
        tail = num_tokens - findable
        misses = {self._tail_reason(tail): tail}
        if missing := findable - miss.page * self._page_size:
            misses = {miss.reason: missing, **misses}
        return {reason: count for reason, count in misses.items() if count}

    def _tail_reason(self, tail: int) -> str:
        return "last_token" if tail == self._page_size else "partial_page"


def _nowhere(_digest: Digest) -> bool:
    return False
