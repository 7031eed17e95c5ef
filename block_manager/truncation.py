from __future__ import annotations

from collections import abc

from .kv_group import KVGroup
from .page_copies import PageCopies
from .prefix_search import PrefixSearch
from .state_group import StateGroup
from .types import PageId, PageTable


class Truncation:
    def __init__(
        self,
        groups: abc.Sequence[KVGroup],
        states: abc.Sequence[StateGroup],
        prefixes: PrefixSearch,
        copies: PageCopies,
    ) -> None:
        self._groups = groups
        self._windowed = tuple(group for group in groups if group.spec.window is not None)
        self._states = states
        self._prefixes = prefixes
        self._copies = copies

    def rollback(self, table: PageTable, num_tokens: int) -> None:
        """Cut a table to ``num_tokens`` positions or fewer; see ``BlockManager.rollback``."""
        assert 0 <= num_tokens <= table.num_written, f"cannot roll back to {num_tokens}"
        num_full, partial = divmod(num_tokens, table.page_size)
        table.reserved_ahead = 0
        if self._states and num_tokens < table.num_written:  # states can only be restored from snapshots
            self._truncate(table, num_full)
            for states in self._states:
                states.restore(table, len(table.digests), self._copies.begin)
            return
        if self._has_lost_window(table, num_tokens):
            self._truncate(table, num_full)
            return
        self.trim(table, num_full + (partial > 0))
        del table.digests[num_full:]
        table.num_written = num_tokens
        if partial:
            self._own_partial_page(table, num_full)

    def trim(self, table: PageTable, num_pages: int) -> None:
        for group, part in zip(self._groups, table.parts, strict=True):
            group.trim(part, num_pages)
        table.update_capacity()

    def _has_lost_window(self, table: PageTable, num_tokens: int) -> bool:
        return any(
            table.parts[group.index].window_start
            > max(group.first_visible_page(num_tokens), group.num_sink_pages)
            for group in self._windowed
        )

    def _truncate(self, table: PageTable, num_pages: int) -> None:
        num_pages = self._prefixes.longest(table.digests, num_pages, table)
        for group in self._groups:
            group.reacquire_window(table, num_pages)
        del table.digests[num_pages:]
        table.num_written = num_pages * table.page_size
        table.update_capacity()

    def _own_partial_page(self, table: PageTable, index: int) -> None:
        foreign = [
            (group, part)
            for group, part in zip(self._groups, table.parts, strict=True)
            if not group.pool.is_private(PageId(part.pages[index]))
        ]
        if not all(group.pool.num_idle for group, _ in foreign):
            self._truncate(table, index)
            return
        for group, part in foreign:
            page = PageId(part.pages.pop())
            group.extend(part, index + 1)
            self._copies.begin(group, page, part.pages[index])
            group.pool.decref([page])
