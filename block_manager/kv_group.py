from __future__ import annotations

from array import array
from collections import OrderedDict, abc
from typing import cast

from .cache_group import CacheGroup, Fill
from .page_pool import PagePool
from .policies import EvictionPolicy
from .spec import KVGroupSpec
from .types import NULL_PAGE, Digest, GroupPageTable, PageId, PageTable


class OutOfWindowFirst:
    """Eviction policy of groups with a window: evict pages behind the window first.

    A hit at a prompt's end needs only the last pages.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._out_of_window: OrderedDict[PageId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._out_of_window) + len(self._policy)

    def __iter__(self) -> abc.Iterator[PageId]:
        yield from self._out_of_window
        yield from self._policy

    def release(self, pages: abc.Sequence[PageId], digests: abc.Sequence[Digest | None]) -> None:
        self._policy.release(pages, digests)

    def release_out_of_window(
        self,
        pages: abc.Sequence[PageId],
        digests: abc.Sequence[Digest | None],  # noqa: ARG002
    ) -> None:
        for page in pages:
            self._out_of_window[page] = None

    def reuse(self, pages: abc.Sequence[PageId]) -> None:
        out_of_window, others = self._out_of_window, []
        for page in pages:
            if page in out_of_window:
                del out_of_window[page]
            else:
                others.append(page)
        if others:
            self._policy.reuse(others)

    def evict(self, num_pages: int) -> list[PageId]:
        out_of_window = self._out_of_window
        first = min(num_pages, len(out_of_window))
        pages = [out_of_window.popitem(last=False)[0] for _ in range(first)]
        return pages if first == num_pages else pages + self._policy.evict(num_pages - first)


class KVGroup(CacheGroup):
    """Allocates, finds and releases the pages of sequences in one group of layers.

    Pages of a sequence whose window begins in page 5 (``-`` is ``NULL_PAGE``)::

        page    0     1 2 3 4    5 6 7       8 9
                kept  - - - -    visible     reserved ahead
                    window_start ^           ^ num_written
    """

    spec: KVGroupSpec

    def __init__(
        self,
        index: int,
        spec: KVGroupSpec,
        page_size: int,
        *,
        policy: EvictionPolicy,
        clock: abc.Callable[[], float],
    ) -> None:
        self.index = index
        self.spec = spec
        self._order = None if spec.window is None else OutOfWindowFirst(policy)
        self.pool = PagePool(spec.num_pages, policy if self._order is None else self._order, clock=clock)
        self.num_sink_pages = spec.sink_pages(page_size)
        self._page_size = page_size

    def first_visible_page(self, num_written: int) -> int:
        return self.spec.first_visible(num_written) // self._page_size

    def held_pages(self, table: PageTable) -> abc.Sequence[PageId]:
        return self.live(table.parts[self.index])

    def live(self, part: GroupPageTable) -> abc.Sequence[PageId]:
        pages, sink_pages, start = part.pages, self.num_sink_pages, part.window_start
        return page_ids(pages if start <= sink_pages else pages[:sink_pages] + pages[start:])

    def live_indices(self, part: GroupPageTable) -> list[int]:
        count = len(part.pages)
        return [
            *range(min(self.num_sink_pages, count)),
            *range(max(part.window_start, self.num_sink_pages), count),
        ]

    def extend(self, part: GroupPageTable, num_pages: int) -> None:
        """Allocate pages until ``part`` has ``num_pages`` entries; the pool must have enough idle pages."""
        pages = self.pool.allocate(num_pages - len(part.pages))
        assert pages is not None, "more pages are requested than are idle"
        part.pages.fromlist(cast("list[int]", pages))

    def free_out_of_window(self, table: PageTable) -> None:
        """Release pages that no later query of this sequence can see."""
        if self._order is None:
            return
        part = table.parts[self.index]
        first = max(part.window_start, self.num_sink_pages)
        last = self.first_visible_page(table.num_written)
        if first < last:
            run, needed = page_ids(part.pages[first:last]), self._needed_at_branches(table)
            if needed:
                self.pool.decref([run[i - first] for i in range(last - 1, first - 1, -1) if i in needed])
                run = [page for i, page in enumerate(run, first) if i not in needed]
            self.pool.decref(run, release=self._order.release_out_of_window)
            part.pages[first:last] = _null_pages(last - first)
            part.window_start = last

    def _needed_at_branches(self, table: PageTable) -> set[int]:
        needed = self.spec.needed_pages
        return {page for end in table.branch_points for page in needed(end, self._page_size)}

    def trim(self, part: GroupPageTable, num_pages: int) -> None:
        """Release all but the first ``num_pages`` pages, the last page first."""
        pages, sink_pages, start = part.pages, self.num_sink_pages, part.window_start
        window = pages[max(num_pages, start) :]
        tail = pages[num_pages:sink_pages] + window if start > sink_pages else pages[num_pages:]
        del pages[num_pages:]
        part.window_start = min(start, num_pages)
        tail.reverse()
        self.pool.decref(page_ids(tail))

    def share(self, part: GroupPageTable, num_pages: int) -> GroupPageTable:
        """Return a copy of ``part`` for a second table; both tables hold its first ``num_pages`` pages."""
        shared = GroupPageTable(part.pages[:num_pages], min(part.window_start, num_pages))
        self.pool.incref(self.live(shared))
        return shared

    def longest_prefix(
        self, digests: abc.Sequence[Digest], num_pages: int, table: PageTable | None = None
    ) -> int:
        held = None if table is None else table.parts[self.index]
        while (missing := self.last_missing(digests, num_pages, held)) is not None:
            num_pages = missing
        return num_pages

    def last_missing(
        self,
        digests: abc.Sequence[Digest],
        num_pages: int,
        held: GroupPageTable | None = None,
    ) -> int | None:
        """Return the index of the last page that is needed but not cached; None if all are cached."""
        for index in self.spec.needed_pages(num_pages, self._page_size):
            if held is not None and (index < self.num_sink_pages or index >= held.window_start):
                continue
            if index >= len(digests) or not self.pool.is_cached(digests[index]):
                return index
        return None

    def acquire(self, digests: abc.Sequence[Digest], num_pages: int) -> GroupPageTable:
        """Hold the cached pages that a sequence needs to continue after ``num_pages`` pages."""
        sink_pages, first = self.num_sink_pages, 0
        if self.spec.window is not None:
            first = self.first_visible_page(num_pages * self._page_size)
        if first <= sink_pages:
            found = digests if num_pages == len(digests) else digests[:num_pages]
            return GroupPageTable(array("i", self.pool.acquire(found)))
        pages = array("i", self.pool.acquire(digests[:sink_pages]))
        pages.extend(_null_pages(first - sink_pages))
        pages.extend(self.pool.acquire(digests[first:num_pages]))
        return GroupPageTable(pages, first)

    def reacquire_window(self, table: PageTable, num_pages: int) -> None:
        """Shorten ``table`` to ``num_pages`` pages, and hold the pages that its window sees there."""
        part, digests = table.parts[self.index], table.digests
        self.trim(part, num_pages)
        first = max(self.first_visible_page(num_pages * self._page_size), self.num_sink_pages)
        if first < part.window_start:
            found = self.pool.acquire(digests[first : part.window_start])
            part.pages[first : part.window_start] = array("i", found)
            part.window_start = first

    def insert(
        self,
        digests: abc.Sequence[Digest],
        first: int,
        fill: Fill,
        *,
        salt: bytes = b"",
        contents: abc.Sequence[bytes] = (),
    ) -> int | None:
        pool = self.pool
        if self.spec.window is None and pool.prefix_length(digests[:first]) < first:
            return None
        missing = [index for index in range(first, len(digests)) if not pool.is_cached(digests[index])]
        held = pool.acquire([digest for digest in digests if pool.is_cached(digest)])
        new = pool.allocate(len(missing))
        try:
            if new:
                fill(missing, new)
                filled = dict(zip(missing, new, strict=True))
                known = iter(held[len(held) - (len(digests) - first - len(missing)) :])
                pages = [filled[i] if i in filled else next(known) for i in range(first, len(digests))]
                parent = digests[first - 1] if first else None
                pool.publish(pages, digests[first:], parent, salt=salt, contents=contents)
        finally:
            pool.decref([*reversed(new or []), *reversed(held)])
        return None if new is None else len(new)


def page_ids(pages: array[int]) -> abc.Sequence[PageId]:
    return cast("abc.Sequence[PageId]", pages)


def _null_pages(count: int) -> array[int]:
    return array("i", [NULL_PAGE]) * count
