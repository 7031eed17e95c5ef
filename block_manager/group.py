"""One group of layers: its pool, and what its queries can still see of a sequence."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Run
from typing import cast

from .policies import make_policy
from .pool import PagePool
from .types import Digest, GroupPages, PageGroup, PageId, PageTable

Fill = Callable[[list[int], list[PageId]], None]
"""Puts the contents of pages of a sequence, by their indices in it, into pages of a pool."""


class Group:
    """A pool of pages and, for layers with a window, the arithmetic of what falls out of it.

    The picture of one sequence's pages, for a window that begins in page 5 and one kept page
    (``-`` entries were given back and hold 0)::

        page    0     1 2 3 4    5 6 7       8 9
              kept    - - - -    visible     reserved ahead
                        released ^           ^ num_written
    """

    def __init__(
        self,
        index: int,
        specs: Run[PageGroup],
        page_size: int,
        *,
        policy: str,
        clock: Callable[[], float],
    ) -> None:
        self.index = index
        self.spec = spec = specs[index]
        self._outer = spec.window if spec.twin_of is None else specs[spec.twin_of].window
        self.pool = PagePool(spec.num_pages, make_policy(policy, spec.num_pages), clock=clock)
        self.num_kept = -(-spec.keep // page_size)
        self._page_size = page_size

    def first_visible(self, num_written: int, quantize_after: int) -> int:
        """The first page, beside kept ones, that queries from position ``num_written`` on can see."""
        window = self._outer if num_written < quantize_after else self.spec.window
        return 0 if window is None else max(num_written - window + 1, 0) // self._page_size

    def most_held(self, max_chunk: int, quantize_after: int) -> int:
        """Pages that one sequence holds at most, however long, written ``max_chunk`` at a time."""
        if self.spec.window is None:
            return sys.maxsize
        window = self.spec.window
        if self.spec.twin_of is not None:
            window = max(window, min(quantize_after, self._outer or quantize_after))
        return self.num_kept + pages_touched(window - 1 + max_chunk, self._page_size)

    def capacity(self, max_chunk: int, max_pinned: int, quantize_after: int) -> int:
        """Positions that one sequence can have, beside ``max_pinned`` pages."""
        num_pages = self.spec.num_pages - max_pinned
        bounded = self.most_held(max_chunk, quantize_after) <= num_pages
        return sys.maxsize if bounded else num_pages * self._page_size

    def num_findable(self, quantize_after: int) -> int:
        """How many of a sequence's first pages a hit of some length needs of this group."""
        if self.spec.twin_of is None or self.spec.window != 1:
            return sys.maxsize  # those in front of its end are needed, wherever it ends
        if self._outer == 1:  # what the other group shows is the page being written
            return self.num_kept
        return max(self.num_kept, (quantize_after - 1) // self._page_size)

    def live(self, part: GroupPages) -> Run[PageId]:
        """The pages that are held, in order."""
        pages, kept = part.pages, self.num_kept
        return page_ids(pages if part.released <= kept else pages[:kept] + pages[part.released :])

    def live_indices(self, part: GroupPages) -> list[int]:
        """Which of a sequence's pages they are."""
        count = len(part.pages)
        return [*range(min(self.num_kept, count)), *range(max(part.released, self.num_kept), count)]

    def wanted(self, table: PageTable, num_tokens: int, max_chunk: int) -> int:
        """Pages the part should reach for positions ``[0, num_tokens)`` and, as far as room was
        promised, for the chunks after them: those of a window need no more than this at a time."""
        promised = -(-table.promised // self._page_size)
        if self.spec.window is not None:
            first = max(self.first_visible(table.num_written, table.quantize_after), self.num_kept)
            most = self.most_held(max_chunk, table.quantize_after)
            promised = min(promised, first - self.num_kept + most)
        return max(-(-num_tokens // self._page_size), promised)

    def extend(self, part: GroupPages, num_pages: int) -> None:
        """Take pages up to ``num_pages``, which the pool has."""
        pages = self.pool.take(num_pages - len(part.pages))
        assert pages is not None, "more pages are taken than are idle"
        part.pages.fromlist(cast("list[int]", pages))

    def release(self, table: PageTable) -> None:
        """Give back what no query of a table from now on can see."""
        if self.spec.window is None:
            return
        part = table.parts[self.index]
        first = max(part.released, self.num_kept)
        last = self.first_visible(table.num_written, table.quantize_after)
        if first < last:
            self.pool.drop(page_ids(part.pages[first:last]))
            part.pages[first:last] = array("i", bytes(4 * (last - first)))
            part.released = last

    def trim(self, part: GroupPages, num_pages: int) -> None:
        """Give back all but the first ``num_pages``, tail first."""
        pages, kept, released = part.pages, self.num_kept, part.released
        if released > kept:
            tail = pages[num_pages:kept] + pages[max(num_pages, released) :]
        else:
            tail = pages[num_pages:]
        del pages[num_pages:]
        part.released = min(released, num_pages)
        tail.reverse()
        self.pool.drop(page_ids(tail))

    def share(self, part: GroupPages, num_pages: int) -> GroupPages:
        """A second holder of the first ``num_pages``."""
        shared = GroupPages(part.pages[:num_pages], min(part.released, num_pages))
        self.pool.hold(self.live(shared))
        return shared

    def longest(self, table: PageTable, digests: Run[Digest], num_pages: int, *, new: bool) -> int:
        """The longest beginning of at most ``num_pages`` pages after which a sequence can go on: all
        it would see is in the table, unless that is a new one, or can be found."""
        if self.spec.window is None:
            return self.pool.num_found(digests[:num_pages]) if new else num_pages
        part = None if new else table.parts[self.index]
        while (missing := self._missing(digests, num_pages, part, table.quantize_after)) is not None:
            num_pages = missing  # whatever is longer would see that page, too
        return num_pages

    def missing(self, table: PageTable, num_pages: int) -> int | None:
        """The last page that cannot be found of those needed to go on after ``num_pages`` pages."""
        return self._missing(table.digests, num_pages, None, table.quantize_after)

    def _missing(
        self, digests: Run[Digest], num_pages: int, part: GroupPages | None, quantize_after: int
    ) -> int | None:
        for index in self.needed(num_pages, quantize_after):
            if part is not None and (index < self.num_kept or index >= part.released):
                continue
            if index >= len(digests) or not self.pool.can_find(digests[index]):
                return index
        return None

    def needed(self, num_pages: int, quantize_after: int) -> Iterable[int]:
        """The pages without which a sequence cannot go on after ``num_pages`` full ones, last first."""
        first = self.first_visible(num_pages * self._page_size, quantize_after)
        yield from range(num_pages - 1, first - 1, -1)
        yield from range(min(first, self.num_kept) - 1, -1, -1)

    def find(self, digests: Run[Digest], num_pages: int, quantize_after: int) -> GroupPages:
        """Hold what is needed to go on after ``num_pages`` pages that ``longest`` has confirmed."""
        kept, first = self.num_kept, self.first_visible(num_pages * self._page_size, quantize_after)
        if first <= kept:
            return GroupPages(array("i", self.pool.hold_prefix(digests[:num_pages])))
        pages = array("i", self.pool.hold_prefix(digests[:kept]))
        pages.extend(array("i", bytes(4 * (first - kept))))
        pages.extend(self.pool.hold_prefix(digests[first:num_pages]))
        return GroupPages(pages, first)

    def adopt(
        self, digests: Run[Digest], first: int, fill: Fill, *, salt: bytes, contents: Run[bytes]
    ) -> int | None:
        """See ``BlockManager.adopt``, for the pages from ``first`` on of all ``digests``."""
        pool = self.pool
        if self.spec.window is None and pool.num_found(digests[:first]) < first:
            return None
        missing = [index for index in range(first, len(digests)) if not pool.can_find(digests[index])]
        held = pool.hold_prefix([digest for digest in digests if pool.can_find(digest)])
        new = pool.take(len(missing))
        try:
            if new:
                fill(missing, new)
                filled = dict(zip(missing, new, strict=True))
                known = iter(held[len(held) - (len(digests) - first - len(missing)) :])
                pages = [filled[i] if i in filled else next(known) for i in range(first, len(digests))]
                parent = digests[first - 1] if first else None
                pool.publish(pages, digests[first:], parent, salt=salt, contents=contents)
        finally:
            pool.drop([*reversed(new or []), *reversed(held)])
        return None if new is None else len(new)

    def recover(self, table: PageTable, num_pages: int) -> None:
        """Shorten a table's part to ``num_pages``, holding again what had been given back of it and is
        seen from there on; ``longest`` has confirmed that it can be found."""
        part, digests = table.parts[self.index], table.digests
        self.trim(part, num_pages)
        first = self.first_visible(num_pages * self._page_size, table.quantize_after)
        first = max(first, self.num_kept)
        if first < part.released:
            part.pages[first : part.released] = array(
                "i", self.pool.hold_prefix(digests[first : part.released])
            )
            part.released = first


def pages_touched(num_positions: int, page_size: int) -> int:
    """Pages that a run of positions can touch, wherever it begins."""
    return (num_positions + page_size - 2) // page_size + 1


def page_ids(pages: array[int]) -> Run[PageId]:
    """What a table's array holds, told to the type checker without touching each page."""
    return cast("Run[PageId]", pages)
