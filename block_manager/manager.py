"""Page tables: which page holds which position of which sequence."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from typing import cast

from octavo.block_manager.digests import TOKEN_BYTES, Hasher, pack, root, sha256_chain
from octavo.block_manager.events import EventLog
from octavo.block_manager.misses import FirstPages, Miss
from octavo.block_manager.policies import DEFAULT_POLICY, make_policy
from octavo.block_manager.pool import PagePool
from octavo.block_manager.types import Digest, Fork, PageCopy, PageId, PageTable


class BlockManager:
    """Gives sequences pages of a fixed pool and lets them share what they have in common.

    num_pages      size of the pool; it never grows
    page_size      positions per page
    hasher         names the contents of pages; see digests.py
    prefix_cache   False: nothing is published and every ``open`` starts empty
    policy         which idle page goes next, by its name in ``POLICIES``
    max_pinned     pages that ``Pins`` may hold for good; sequences are not let in on them
    clock          seconds, for saying when a page was evicted

    Who may hold, write and free a page, and when: README.md in this folder.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        hasher: Hasher = sha256_chain,
        prefix_cache: bool = True,
        policy: str = DEFAULT_POLICY,
        max_pinned: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}; 32 is a good start")
        if not 0 <= max_pinned < max(num_pages, 1):
            raise ValueError(
                f"max_pinned must be at least 0 and less than the {num_pages} pages of the pool, "
                f"got {max_pinned}; sequences need room, too"
            )
        self.page_size = page_size
        self.max_pinned = max_pinned
        self.prefix_cache = prefix_cache
        self._pool = PagePool(num_pages, make_policy(policy, num_pages), clock=clock)
        self._hasher = hasher
        self._tables: set[PageTable] = set()
        self._first_pages = FirstPages(num_pages)
        self._copies: list[PageCopy] = []  # handed out and not yet carried out

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def capacity(self) -> int:
        """Positions that one sequence can have room for, whatever is pinned."""
        return (self._pool.num_pages - self.max_pinned) * self.page_size

    @property
    def num_held(self) -> int:
        return self._pool.num_pages - self._pool.num_idle

    @property
    def num_idle(self) -> int:
        """Pages that can be handed out: cached and empty ones."""
        return self._pool.num_idle

    @property
    def num_idle_cached(self) -> int:
        return self._pool.num_idle_cached

    @property
    def num_idle_empty(self) -> int:
        return self._pool.num_idle_empty

    @property
    def num_evicted(self) -> int:
        """Cached pages that were given to somebody else, since the start."""
        return self._pool.num_evicted

    @property
    def events(self) -> EventLog:
        """What could be found since when, in order."""
        return self._pool.events

    def open(
        self, tokens: Tokens[int], *, salt: bytes = b"", digests: list[Digest] | None = None
    ) -> PageTable:
        """A table with the longest cached prefix of ``tokens``, short of the last token.

        The last token is always left to compute: its logits are what a caller is after, and
        so the page being written is never one that somebody else may find.

        The table remembers the digests of these tokens: until ``rollback`` says otherwise, they
        are what it will be written with.

        digests   what an earlier table of the same tokens and salt knew (its ``digests``):
                  they are not computed again; the new table takes the list over
        """
        table = PageTable(self.page_size, salt)
        if digests is not None:
            table.digests = digests
        if self.prefix_cache:
            num_pages = max(len(tokens) - 1, 0) // self.page_size
            self._extend_digests(table, tokens, num_pages)
            pages = self._pool.hold_prefix(table.digests[:num_pages])
            table.pages.extend(pages)
            table.num_written = len(pages) * self.page_size
        self._tables.add(table)
        return table

    def explain_miss(self, table: PageTable, tokens: Tokens[int]) -> Miss:
        """Why ``open`` with these tokens found what is in ``table`` and no more; before ``commit``."""
        if not self.prefix_cache:
            return Miss(0, "disabled")
        num_tokens, page = len(tokens), table.num_written // self.page_size
        if page == max(num_tokens - 1, 0) // self.page_size:
            tail = num_tokens - page * self.page_size
            return Miss(page, self._tail_reason(tail))
        evicted_at = self._pool.evictions.when(table.digests[page])
        if evicted_at is not None:
            return Miss(page, "evicted", evicted_at)
        if page == 0 and self._first_pages.has_other(pack(tokens[: self.page_size]), table.salt):
            return Miss(page, "other_salt")
        return Miss(page, "new")

    def count_misses(self, num_tokens: int, miss: Miss) -> dict[str, int]:
        """Tokens that were not found, by reason: those after the first page that could have
        been found and was not have its reason, for without it they are not looked for."""
        if miss.reason == "disabled":
            return {"disabled": num_tokens}
        findable = max(num_tokens - 1, 0) // self.page_size * self.page_size
        tail = num_tokens - findable
        misses = {self._tail_reason(tail): tail}
        if missing := findable - miss.page * self.page_size:
            misses = {miss.reason: missing, **misses}
        return {reason: count for reason, count in misses.items() if count}

    def _tail_reason(self, tail: int) -> str:
        return "last_token" if tail == self.page_size else "partial_page"

    def would_overflow(self, table: PageTable, num_tokens: int) -> bool:
        """Whether writing positions ``[0, num_tokens)`` needs pages that are not yet reserved."""
        return num_tokens > len(table.pages) * self.page_size

    def reserve(self, table: PageTable, num_tokens: int) -> bool:
        """Make room for positions ``[0, num_tokens)``; False, and no change, if the pool is short."""
        missing = -(-num_tokens // self.page_size) - len(table.pages)
        if missing <= 0:
            return True
        pages = self._pool.take(missing)
        if pages is None:
            return False
        table.pages.extend(pages)
        return True

    def commit(self, table: PageTable, tokens: Tokens[int], num_written: int) -> None:
        """Record that K/V of positions ``[0, num_written)`` is in memory; publish the pages it fills.

        A full page never changes again: whoever finds it may rely on it.
        """
        first, last = table.num_written // self.page_size, num_written // self.page_size
        assert table.num_written <= num_written <= table.capacity, "written where no page is reserved"
        table.num_written = num_written
        if first == last or not self.prefix_cache:
            return
        self._extend_digests(table, tokens, last)
        if first == 0:
            self._first_pages.add(pack(tokens[: self.page_size]), table.salt)
        parent = table.digests[first - 1] if first else None
        self._pool.publish(_ids(table.pages[first:last]), table.digests[first:last], parent)

    def fork(self, table: PageTable) -> Fork | None:
        """A second table with the same written positions; None, and no change, if the pool is short.

        Full pages are shared. A partial one will be written by both sides, so the new table
        gets its own, filled by the copy: carry it out, then say so with ``copied``.
        """
        num_full, partial = divmod(table.num_written, self.page_size)
        target = self._pool.take(1) if partial else []
        if target is None:
            return None
        shared = table.pages[:num_full]
        self._pool.hold(_ids(shared))
        forked = PageTable(
            self.page_size,
            table.salt,
            pages=shared + array("i", target),
            digests=table.digests[:num_full],
            num_written=table.num_written,
        )
        self._tables.add(forked)
        return Fork(forked, self._copy(PageId(table.pages[num_full]), target[0]) if partial else None)

    def rollback(self, table: PageTable, num_tokens: int) -> PageCopy | None:
        """Forget everything past position ``num_tokens``, reserved pages included.

        A page that somebody else holds or can find is never written again. If the new end
        lies inside one, the table gets a private copy of it: carry out the returned copy, then
        say so with ``copied``. If the pool has no page for that, the table ends at the last
        page boundary instead; ``table.num_written`` says where, and the rest is recomputed.
        """
        assert 0 <= num_tokens <= table.num_written, f"cannot roll back to {num_tokens}"
        num_full, partial = divmod(num_tokens, self.page_size)
        self._trim(table, num_full + (partial > 0))
        del table.digests[num_full:]
        table.num_written = num_tokens
        if not partial or self._pool.is_private(page := PageId(table.pages[num_full])):
            return None
        target = self._pool.take(1)
        if target is None:
            self._trim(table, num_full)
            table.num_written = num_full * self.page_size
            return None
        table.pages[num_full] = target[0]
        copy = self._copy(page, target[0])
        self._pool.drop([page])
        return copy

    def copied(self, copies: Iterable[PageCopy]) -> None:
        """These copies have been carried out, or nobody wants them any more: release their pages."""
        for copy in copies:
            self._copies.remove(copy)
            self._pool.drop([copy.target, copy.source])

    def close(self, table: PageTable) -> None:
        """Give every page back, tail first, so that a shared head outlives its tails."""
        self._tables.remove(table)
        self._trim(table, 0)
        table.num_written = 0

    def flush(self) -> int:
        """Forget the contents of every idle page; returns how many there were."""
        return self._pool.flush()

    def check(self) -> None:
        """Raise AssertionError if a rule of README.md is broken; slow, for tests."""
        self._pool.check()
        in_tables = Counter(page for table in self._tables for page in table.pages)
        in_copies = Counter(page for copy in self._copies for page in (copy.source, copy.target))
        for page in map(PageId, range(self.num_pages)):
            expected = in_tables[page] + in_copies[page]
            assert self._pool.num_holders(page) == expected, f"page {page} is not held {expected} times"
        targets = Counter(copy.target for copy in self._copies)
        assert not targets.keys() & {copy.source for copy in self._copies}, "a copy reads another's target"
        assert all(count == 1 for count in targets.values()), "two copies write one page"
        for table in self._tables:
            assert 0 <= table.num_written <= table.capacity, "written where no page is reserved"
            for page in _ids(table.pages[table.num_written // self.page_size :]):
                assert in_tables[page] == 1, f"page {page} is written by one table and held by another"
                assert not self._pool.is_published(page), f"page {page} can be found and is still written"

    def _extend_digests(self, table: PageTable, tokens: Tokens[int], num_pages: int) -> None:
        """Make the digests of the first ``num_pages`` pages known, hashing only the new ones."""
        digests, page_size = table.digests, self.page_size
        if len(digests) >= num_pages:
            return
        parent = digests[-1] if digests else root(table.salt)
        packed = pack(tokens[len(digests) * page_size : num_pages * page_size])
        digests += self._hasher(parent, packed, page_size * TOKEN_BYTES)
        assert len(digests) == num_pages, f"{len(digests)} digests for {num_pages} pages"

    def _copy(self, source: PageId, target: PageId) -> PageCopy:
        assert all(source != copy.target for copy in self._copies), f"page {source} is not filled yet"
        self._pool.hold((source, target))
        copy = PageCopy(source, target)
        self._copies.append(copy)
        return copy

    def _trim(self, table: PageTable, num_pages: int) -> None:
        tail = table.pages[num_pages:]
        del table.pages[num_pages:]
        tail.reverse()
        self._pool.drop(_ids(tail))


def _ids(pages: array[int]) -> Tokens[PageId]:
    """What a table's array holds, told to the type checker without touching each page."""
    return cast("Tokens[PageId]", pages)
