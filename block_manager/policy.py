"""Which idle page gives up its contents next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Run
from itertools import islice
from typing import Protocol

from .types import Digest, PageId


class EvictionPolicy(Protocol):
    """Keeps the idle pages whose contents can still be found, and says which to give up.

    A page is listed from ``release`` until ``reuse`` or ``evict`` takes it off. Methods work on runs
    of pages, because a call per page costs more than the page.
    """

    def __len__(self) -> int:
        """Pages that are listed."""

    def __iter__(self) -> Iterator[PageId]:
        """The listed pages, in no particular order."""

    def release(self, pages: Run[PageId], digests: Run[Digest | None]) -> None:
        """List pages that have become idle, those of a sequence's tail first.

        digests   of all pages of the pool; only to be read
        """

    def reuse(self, pages: Run[PageId]) -> None:
        """These pages were found; listed ones leave the list, the others are held by somebody."""

    def evict(self, num_pages: int) -> list[PageId]:
        """Take so many pages off the list, which has at least as many; the worst first."""


class LRU:
    """Least recently released first, which is tails before heads."""

    def __init__(self) -> None:
        self._idle: OrderedDict[PageId, None] = OrderedDict()  # next at the front

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[PageId]:
        return iter(self._idle)

    def release(self, pages: Run[PageId], digests: Run[Digest | None]) -> None:  # noqa: ARG002
        idle = self._idle
        for page in pages:  # a third of what update() takes
            idle[page] = None

    def reuse(self, pages: Run[PageId]) -> None:
        idle = self._idle
        for page in pages:
            if page in idle:
                del idle[page]

    def evict(self, num_pages: int) -> list[PageId]:
        idle = self._idle
        pages = list(islice(idle, num_pages))
        for page in pages:
            del idle[page]
        return pages


class LFU:
    """Least often found first, and of those the least recently released. What is evicted is
    forgotten; counts end at ``MOST``, so that finding the least is not a search."""

    MOST = 63

    def __init__(self) -> None:
        self._idle: list[OrderedDict[PageId, None]] = [OrderedDict() for _ in range(self.MOST + 1)]
        self._num_idle = 0
        self._num_uses: dict[PageId, int] = {}  # of every page that is not forgotten

    def __len__(self) -> int:
        return self._num_idle

    def __iter__(self) -> Iterator[PageId]:
        return (page for pages in self._idle for page in pages)

    def release(self, pages: Run[PageId], digests: Run[Digest | None]) -> None:  # noqa: ARG002
        for page in pages:
            self._idle[self._num_uses.setdefault(page, 0)][page] = None
        self._num_idle += len(pages)

    def reuse(self, pages: Run[PageId]) -> None:
        for page in pages:
            num_uses = self._num_uses.get(page, 0)
            if page in self._idle[num_uses]:
                del self._idle[num_uses][page]
                self._num_idle -= 1
            self._num_uses[page] = min(num_uses + 1, self.MOST)

    def evict(self, num_pages: int) -> list[PageId]:
        evicted: list[PageId] = []
        for pages in self._idle:
            while pages and len(evicted) < num_pages:
                page, _ = pages.popitem(last=False)
                del self._num_uses[page]
                evicted.append(page)
        self._num_idle -= len(evicted)
        return evicted
