"""Least recently used: the default."""

from __future__ import annotations

from collections import OrderedDict, abc
from itertools import islice

from ..types import Digest, PageId
from .base import register


@register("lru")
class LRU:
    """Evicts the least recently released page first, and so tails before heads."""

    def __init__(self, num_pages: int = 0) -> None:  # noqa: ARG002
        self._idle: OrderedDict[PageId, None] = OrderedDict()  # the next page to evict is at the front

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> abc.Iterator[PageId]:
        return iter(self._idle)

    def release(self, pages: abc.Sequence[PageId], digests: abc.Sequence[Digest | None]) -> None:  # noqa: ARG002
        idle = self._idle
        for page in pages:  # takes a third of the time of update()
            idle[page] = None

    def reuse(self, pages: abc.Sequence[PageId]) -> None:
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
