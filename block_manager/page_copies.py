"""Copies of pages that were handed out and not yet carried out: both ends are held until then."""

from __future__ import annotations

from collections import abc

from .kv_group import KVGroup
from .state_group import StateGroup
from .types import PageCopy, PageId


class PageCopies:
    """Copies of pages that the runner is asked for.

    pending   those that nobody has reported yet, in order
    """

    def __init__(self, groups: abc.Sequence[KVGroup], states: StateGroup | None) -> None:
        self._pools = [each.pool for each in groups]
        self._states = states
        if states is not None:
            self._pools.append(states.pool)
        self.pending: list[PageCopy] = []

    def begin(self, group: KVGroup | StateGroup, source: int, target: int) -> PageCopy:
        """Hold both pages of a copy until it is released."""
        copy = PageCopy(PageId(source), PageId(target), group.index)
        assert all((source, group.index) != (other.target, other.group) for other in self.pending), (
            f"page {source} is not filled yet"
        )
        group.pool.incref((copy.source, copy.target))
        self.pending.append(copy)
        return copy

    def slot(self, source: PageId, target: PageId) -> PageCopy:
        """``begin`` of two slots of recurrent state."""
        assert self._states is not None
        return self.begin(self._states, source, target)

    def release(self, copies: abc.Iterable[PageCopy]) -> None:
        """Let go of copies that have been carried out, or that nobody wants any more."""
        for copy in copies:
            self.pending.remove(copy)
            self._pools[copy.group].decref([copy.target, copy.source])
