from __future__ import annotations

from collections import OrderedDict, abc
from dataclasses import dataclass

from .digests import page_contents
from .types import Digest, PageTable


@dataclass(frozen=True, slots=True)
class Miss:
    """The first page of a prompt that was not found in the prefix cache, and the reason.

    page         index of the page in the prompt
    reason       disabled       the cache is off, or this prompt skips it
                 new            the page was never cached, or its eviction is no longer recorded
                 evicted        the page was evicted
                 no_state       pages are cached, but no snapshot of the recurrent state
                 other_format   the page is on disk in another format or of another model
                 other_salt     the first page was written under another salt
                 last_token     the page has the prompt's last token, which is always computed
                 partial_page   the prompt ends before the page is full
    evicted_at   for ``evicted``: time in seconds
    other_salts  for ``other_salt``: some of these salts; secret to other tenants
    """

    page: int
    reason: str
    evicted_at: float | None = None
    num_pages: int = 0
    other_salts: tuple[bytes, ...] = ()


class Evictions:
    """Times of at least the latest ``capacity`` evictions, indexed when one is asked for."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._new: list[tuple[float, abc.Sequence[Digest]]] = []
        self._num_new = 0
        self._latest: dict[Digest, float] = {}
        self._earlier: dict[Digest, float] = {}

    def add(self, digests: abc.Sequence[Digest], now: float) -> None:
        self._new.append((now, digests))
        self._num_new += len(digests)
        if self._num_new >= self._capacity:
            self._index()

    def when(self, digest: Digest) -> float | None:
        self._index()
        return self._latest.get(digest, self._earlier.get(digest))

    def _index(self) -> None:
        for now, digests in self._new:
            if len(self._latest) >= self._capacity:
                self._earlier, self._latest = self._latest, {}
            self._latest.update(dict.fromkeys(digests, now))
        self._new, self._num_new = [], 0


class FirstPages:
    SALTS = 2

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._salts: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()

    def add(self, packed: bytes, salt: bytes) -> None:
        known = self._salts.pop(packed, ())
        self._salts[packed] = known if salt in known else (*known, salt)[-self.SALTS :]
        if len(self._salts) > self._capacity:
            self._salts.popitem(last=False)

    def others(self, packed: bytes, salt: bytes) -> tuple[bytes, ...]:
        return tuple(known for known in self._salts.get(packed, ()) if known != salt)


class MissClassifier:
    def __init__(
        self, page_size: int, capacity: int, *, evicted: abc.Callable[[PageTable, int], float | None]
    ) -> None:
        self._page_size = page_size
        self._first_pages = FirstPages(capacity)
        self._evicted = evicted
        self.in_other_format: abc.Callable[[Digest], bool] = lambda _: False

    def first_page(self, contents: bytes, salt: bytes) -> None:
        self._first_pages.add(contents, salt)

    def explain(self, table: PageTable, tokens: abc.Sequence[int]) -> Miss:
        """Return why the prefix cache had no more pages for a table just opened for these tokens."""
        num_tokens, page = len(tokens), table.num_written // self._page_size
        if page == max(num_tokens - 1, 0) // self._page_size:
            return Miss(page, self._tail_reason(num_tokens - page * self._page_size))
        if table.state is not None and table.state.branch > page:
            return Miss(page, "no_state", num_pages=table.state.branch)
        evicted_at = self._evicted(table, page + 1)
        if evicted_at is not None:
            return Miss(page, "evicted", evicted_at)
        if self.in_other_format(table.digests[page]):
            return Miss(page, "other_format")
        (contents,) = page_contents(tokens, 0, 1, page_size=self._page_size, media=table.media)
        others = () if page else self._first_pages.others(contents, table.salt)
        return Miss(page, "other_salt" if others else "new", other_salts=others)

    def count(self, num_tokens: int, miss: Miss) -> dict[str, int]:
        """Return the number of tokens not found in the cache, by reason.

        All tokens after the first missing page share its reason.
        """
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
