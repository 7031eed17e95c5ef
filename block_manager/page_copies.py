"""Copies of pages, from the operation that needs them to the step that carries them out."""

from __future__ import annotations

from collections import abc

from .cache_group import CacheGroup
from .types import PageCopy, PageId


class PageCopies:
    """Copies of pages and slots. Both ends of a copy are held until it is released.

    waiting   copies that no step has taken yet; each target belongs to an open table
    taken     copies that a step has taken and nobody has reported yet, in order
    """

    def __init__(self, groups: abc.Iterable[CacheGroup]) -> None:
        self._pools = [each.pool for each in groups]
        self.waiting: list[PageCopy] = []
        self.taken: list[PageCopy] = []

    @property
    def pending(self) -> list[PageCopy]:
        """All copies that hold their pages."""
        return self.waiting + self.taken

    def begin(self, group: CacheGroup, source: int, target: int) -> None:
        """Hold both pages of a copy until it is released."""
        copy = PageCopy(PageId(source), PageId(target), group.index)
        assert all((source, group.index) != (other.target, other.group) for other in self.pending), (
            f"page {source} is not filled yet"
        )
        group.pool.incref((copy.source, copy.target))
        self.waiting.append(copy)

    def take(self) -> tuple[PageCopy, ...]:
        """Hand the waiting copies to a step."""
        copies, self.waiting = self.waiting, []
        self.taken += copies
        return tuple(copies)

    def cancel(self, held: abc.Iterable[tuple[int, PageId]]) -> None:
        """Drop the waiting copies into these pages, by group, of a table that closes."""
        pages = set(held)
        dropped = [copy for copy in self.waiting if (copy.group, copy.target) in pages]
        self.waiting = [copy for copy in self.waiting if (copy.group, copy.target) not in pages]
        self._let_go(dropped)

    def release(self, copies: abc.Iterable[PageCopy]) -> None:
        """Let go of copies that a step has carried out."""
        copies = tuple(copies)
        for copy in copies:
            self.taken.remove(copy)
        self._let_go(copies)

    def _let_go(self, copies: abc.Iterable[PageCopy]) -> None:
        for copy in copies:
            self._pools[copy.group].decref([copy.target, copy.source])
