"""How long a beginning of a sequence is cached in every group at once."""

from __future__ import annotations

from collections import abc

from .kv_group import KVGroup
from .state_group import StateGroup
from .types import Digest, PageTable


class PrefixSearch:
    """Looks in all groups together: a sequence goes on where each of them has what its layers see.

    states   slots of recurrent layers, if the model has any
    """

    def __init__(self, groups: abc.Sequence[KVGroup], states: StateGroup | None) -> None:
        self._groups = groups
        self._full = tuple(group for group in groups if group.spec.window is None)
        self._windowed = tuple(group for group in groups if group.spec.window is not None)
        self._states = states

    def find(self, table: PageTable, digests: abc.Sequence[Digest]) -> int:
        """Return after how many pages an empty table can go on in every group, and hold the state there.

        In a single group without a window no more can be said than whoever holds its pages sees: all."""
        if len(self._groups) == 1 and not self._windowed and self._states is None:
            return len(digests)  # one pass instead of two: 5 % of a short prompt
        num_pages = self.longest(digests, len(digests), table.quantize_after)
        if self._states is not None:
            assert table.state is not None
            after = table.quantize_after
            table.state.junction = self.longest(digests, len(digests), after, with_state=False)
            self._states.hold_snapshot(table.state, digests, num_pages)
        return num_pages

    def longest(
        self,
        digests: abc.Sequence[Digest],
        num_pages: int,
        quantize_after: int,
        table: PageTable | None = None,
        *,
        with_state: bool = True,
    ) -> int:
        """Return the greatest number of pages after which every group can go on.

        It is at most ``num_pages``; groups go on with what is cached and, if ``table`` is shortened, with
        what it holds. ``with_state`` False: as far as pages go, whether or not there is a snapshot of the
        recurrent state."""
        for group in self._full:  # whatever is shorter does for them, too
            if table is None:
                num_pages = group.pool.prefix_length(digests[:num_pages])
        longer = num_pages + 1
        states = self._states if with_state else None
        while (self._windowed or states is not None) and num_pages < longer:
            longer = num_pages
            if states is not None:
                num_pages = states.longest_prefix(digests, num_pages)
            for group in self._windowed:
                held = None if table is None else table.parts[group.index]
                num_pages = group.longest_prefix(digests, num_pages, quantize_after, held)
        return num_pages

    def evicted_at(self, table: PageTable, num_pages: int) -> float | None:
        """Return when a page was evicted without which no sequence can go on after ``num_pages`` pages."""
        for group in self._groups:
            missing = group.last_missing(table.digests, num_pages, table.quantize_after)
            evicted_at = None if missing is None else group.pool.evictions.when(table.digests[missing])
            if evicted_at is not None:
                return evicted_at
        return None
