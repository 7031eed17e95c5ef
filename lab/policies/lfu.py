from __future__ import annotations

from collections import OrderedDict, abc

from octavo.block_manager.policies.base import register
from octavo.block_manager.types import Digest, PageId


@register("lfu")
class LFU:
    """Evicts the least frequently used page and, among equals, the least recently released.

    The count of an evicted page is forgotten. Counts stop at ``MOST``.
    """

    MOST = 63

    def __init__(self, num_pages: int = 0) -> None:  # noqa: ARG002
        self._idle: list[OrderedDict[PageId, None]] = [OrderedDict() for _ in range(self.MOST + 1)]
        self._num_idle = 0
        self._num_uses: dict[PageId, int] = {}

    def __len__(self) -> int:
        return self._num_idle

    def __iter__(self) -> abc.Iterator[PageId]:
        return (page for pages in self._idle for page in pages)

    def release(self, pages: abc.Sequence[PageId], digests: abc.Sequence[Digest | None]) -> None:  # noqa: ARG002
        for page in pages:
            self._idle[self._num_uses.setdefault(page, 0)][page] = None
        self._num_idle += len(pages)

    def reuse(self, pages: abc.Sequence[PageId]) -> None:
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
