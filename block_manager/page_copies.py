from __future__ import annotations

from collections import abc

from .cache_group import CacheGroup
from .types import PageCopy, PageId


class PageCopies:
    """Copies of pages and state slots; both ends are held until the copy is released."""

    def __init__(self, groups: abc.Iterable[CacheGroup]) -> None:
        self._pools = [each.pool for each in groups]
        self.waiting: list[PageCopy] = []
        self.taken: list[PageCopy] = []

    @property
    def pending(self) -> list[PageCopy]:
        return self.waiting + self.taken

    def begin(self, group: CacheGroup, source: int, target: int) -> None:
        """Request a copy, and hold both pages until it is released."""
        copy = PageCopy(PageId(source), PageId(target), group.index)
        assert all((source, group.index) != (other.target, other.group) for other in self.pending), (
            f"page {source} is not filled yet"
        )
        group.pool.incref((copy.source, copy.target))
        self.waiting.append(copy)

    def take(self) -> tuple[PageCopy, ...]:
        """Return the waiting copies, which the next step carries out."""
        copies, self.waiting = self.waiting, []
        self.taken += copies
        return tuple(copies)

    def cancel(self, held: abc.Iterable[tuple[int, PageId]]) -> None:
        pages = set(held)
        dropped = [copy for copy in self.waiting if (copy.group, copy.target) in pages]
        self.waiting = [copy for copy in self.waiting if (copy.group, copy.target) not in pages]
        self._release(dropped)

    def release(self, copies: abc.Iterable[PageCopy]) -> None:
        copies = tuple(copies)
        for copy in copies:
            self.taken.remove(copy)
        self._release(copies)

    def _release(self, copies: abc.Iterable[PageCopy]) -> None:
        for copy in copies:
            self._pools[copy.group].decref([copy.target, copy.source])
