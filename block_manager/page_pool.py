from __future__ import annotations

import bisect
import time
from collections import abc

from .events import EventLog
from .miss_reasons import Evictions
from .policies import EvictionPolicy
from .types import Digest, PageCounts, PageId

REMEMBERED = 16_384

Release = abc.Callable[[abc.Sequence[PageId], abc.Sequence[Digest | None]], None]


class PagePool:
    """A fixed set of pages, each held or idle.

    An idle page is *empty* or *cached* (its contents can be found by digest). ``allocate`` takes empty pages
    first, then cached pages in the order of the eviction policy.

    on_forgotten   callback that gets the digests of pages that are no longer cached
    """

    def __init__(
        self, num_pages: int, policy: EvictionPolicy, *, clock: abc.Callable[[], float] = time.monotonic
    ) -> None:
        self.num_pages = num_pages
        self.num_evicted = 0
        self._ref_counts = [0] * num_pages
        self._digest_of: list[Digest | None] = [None] * num_pages
        self._page_of: dict[Digest, PageId] = {}
        self._empty = [PageId(page) for page in range(num_pages - 1, -1, -1)]
        self._cached = policy
        self._clock = clock
        self.on_forgotten: abc.Callable[[abc.Sequence[Digest]], object] | None = None
        self.evictions = Evictions(max(num_pages, REMEMBERED))
        self.events = EventLog(max(num_pages, REMEMBERED))

    @property
    def num_idle(self) -> int:
        return len(self._empty) + len(self._cached)

    def has_idle(self, num_pages: int) -> bool:
        return num_pages <= len(self._empty) or num_pages <= self.num_idle

    @property
    def num_idle_empty(self) -> int:
        return len(self._empty)

    @property
    def num_idle_cached(self) -> int:
        return len(self._cached)

    @property
    def counts(self) -> PageCounts:
        cached, empty = len(self._cached), len(self._empty)
        return PageCounts(self.num_pages - cached - empty, cached, empty)

    def num_shared(self, pages: abc.Sequence[int]) -> int:
        """Return how many pages of a table have several holders; these are its first pages."""
        return bisect.bisect(pages, -2, key=lambda page: -min(self._ref_counts[page], 2))

    def ref_count(self, page: PageId) -> int:
        return self._ref_counts[page]

    def is_private(self, page: PageId) -> bool:
        """Return whether a page may be written: it has one holder and is not cached."""
        return self._ref_counts[page] == 1 and self._digest_of[page] is None

    def is_published(self, page: PageId) -> bool:
        return self._digest_of[page] is not None

    def digest(self, page: PageId) -> Digest:
        digest = self._digest_of[page]
        assert digest is not None, f"page {page} cannot be found"
        return digest

    def digests(self) -> abc.Collection[Digest]:
        return self._page_of.keys()

    def lookup(self, digest: Digest) -> PageId | None:
        """Return the page with this digest, or None; the page gets no holder."""
        return self._page_of.get(digest)

    def allocate(self, num_pages: int) -> list[PageId] | None:
        """Return pages with one holder and undefined contents; None if too few pages are idle."""
        empty, ref_counts = self._empty, self._ref_counts
        if num_pages == 1 and empty:
            page = empty.pop()
            ref_counts[page] = 1
            return [page]
        if not self.has_idle(num_pages):
            return None
        split = max(len(empty) - num_pages, 0)
        pages = empty[split:]
        pages.reverse()
        del empty[split:]
        if len(pages) < num_pages:
            pages += self._evict(num_pages - len(pages))
        for page in pages:
            ref_counts[page] = 1
        return pages

    def _evict(self, num_pages: int) -> list[PageId]:
        pages = self._forget(num_pages)
        self.num_evicted += num_pages
        return pages

    def flush(self) -> int:
        """Empty every idle cached page; return the number of these pages."""
        pages = self._forget(len(self._cached)) if len(self._cached) else []
        self._empty.extend(pages)
        if pages and not self._page_of:
            self.events.add_cleared()
        return len(pages)

    def _forget(self, num_pages: int) -> list[PageId]:
        pages = self._cached.evict(num_pages)
        page_of, digest_of = self._page_of, self._digest_of
        digests = []
        for page in pages:
            digest = digest_of[page]
            assert digest is not None, f"idle page {page} is listed as cached and has no digest"
            del page_of[digest]
            digest_of[page] = None
            digests.append(digest)
        self.evictions.add(digests, self._clock())
        self._tell_forgotten(digests)
        return pages

    def discard(self, digests: abc.Iterable[Digest]) -> int:
        """Empty idle cached pages with these digests; return the number of emptied pages."""
        gone = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None or self._ref_counts[page]:
                continue
            self._cached.reuse([page])
            del self._page_of[digest]
            self._digest_of[page] = None
            self._empty.append(page)
            gone.append(digest)
        if gone:
            self.evictions.add(gone, self._clock())
            self._tell_forgotten(gone)
        return len(gone)

    def _tell_forgotten(self, digests: abc.Sequence[Digest]) -> None:
        self.events.add_removed(digests)
        if self.on_forgotten is not None:
            self.on_forgotten(digests)

    def unpublish(self, page: PageId) -> None:
        """Remove a page from the cache before its only holder writes it."""
        digest = self.digest(page)
        assert self._ref_counts[page] == 1, f"page {page} has {self._ref_counts[page]} holders"
        del self._page_of[digest]
        self._digest_of[page] = None
        self._tell_forgotten([digest])

    def incref(self, pages: abc.Iterable[PageId]) -> None:
        """Add a holder to each of these held pages."""
        for page in pages:
            assert self._ref_counts[page] > 0, f"page {page} is idle: only its digest may revive it"
            self._ref_counts[page] += 1

    def is_cached(self, digest: Digest) -> bool:
        return digest in self._page_of

    def prefix_length(self, digests: abc.Iterable[Digest]) -> int:
        """Return how many digests are cached before the first that is not."""
        page_of, count = self._page_of, 0
        for digest in digests:
            if digest not in page_of:
                break
            count += 1
        return count

    def acquire(self, digests: abc.Iterable[Digest]) -> list[PageId]:
        """Add a holder to the cached pages of these digests, up to the first digest that is not cached."""
        page_of, ref_counts = self._page_of, self._ref_counts
        pages = []
        for digest in digests:
            page = page_of.get(digest)
            if page is None:
                break
            ref_counts[page] += 1
            pages.append(page)
        if pages:
            self._cached.reuse(pages)
        return pages

    def decref(self, pages: abc.Iterable[PageId], *, release: Release | None = None) -> None:
        """Remove a holder of each page; pages without a holder become idle."""
        ref_counts, digest_of, cached = self._ref_counts, self._digest_of, []
        for page in pages:
            left = ref_counts[page] - 1
            ref_counts[page] = left
            if left:
                assert left > 0, f"page {page} is released more often than it was held"
            elif digest_of[page] is None:
                self._empty.append(page)
            else:
                cached.append(page)
        if cached:
            (release or self._cached.release)(cached, digest_of)

    def publish(
        self,
        pages: abc.Sequence[PageId],
        digests: abc.Sequence[Digest],
        parent: Digest | None,
        *,
        salt: bytes = b"",
        contents: abc.Sequence[bytes] = (),
    ) -> None:
        """Cache full, written pages under their digests.

        If a digest already has a page, the new page stays private to its holders.
        """
        page_of, digest_of, events = self._page_of, self._digest_of, self.events
        if len(digests) == 1 and digests[0] not in page_of:
            page_of[digests[0]], digest_of[pages[0]] = pages[0], digests[0]
            events.add_stored(digests, parent, salt, contents)
            return
        new = dict(zip(digests, pages, strict=True))
        if len(new) == len(pages) and page_of.keys().isdisjoint(new):
            page_of.update(new)
            for digest, page in new.items():
                digest_of[page] = digest
            events.add_stored(digests, parent, salt, contents)
            return
        stored: list[Digest] = []
        for index, (page, digest) in enumerate(zip(pages, digests, strict=True)):
            if digest_of[page] is None and page_of.setdefault(digest, page) is page:
                digest_of[page] = digest
                stored.append(digest)
            else:
                if stored:
                    events.add_stored(stored, parent, salt, contents[index - len(stored) : index])
                    stored = []
                parent = digest
        if stored:
            events.add_stored(stored, parent, salt, contents[-len(stored) :])

    def check(self) -> None:
        """Raise AssertionError unless each page is held, or in one of the two lists of idle pages."""
        listed = [*self._empty, *self._cached]
        idle = set(listed)
        assert len(listed) == len(idle), "a page is listed as idle twice"
        for page, ref_counts in enumerate(self._ref_counts):
            assert (page in idle) == (ref_counts == 0), f"page {page} has {ref_counts} holders"
        assert all(self._digest_of[page] is None for page in self._empty), "an empty page has a digest"
        assert all(self._digest_of[page] is not None for page in self._cached), "a cached page has no digest"
        published = {digest: page for page, digest in enumerate(self._digest_of) if digest is not None}
        assert published == self._page_of, "the index of digests and the pages' digests differ"
        assert len(published) == sum(digest is not None for digest in self._digest_of), "two equal digests"
