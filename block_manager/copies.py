"""Copy-on-write: tables that go on from one beginning, and the page copies that takes."""

from __future__ import annotations

from collections.abc import Iterable

from .group import Group
from .groups import Groups
from .types import Fork, PageCopy, PageId, PageTable


class Copies:
    """Forks and rolls back tables, and holds both pages of every copy until it is carried out.

    pending      handed out and not yet reported with ``done``
    """

    def __init__(self, groups: Groups, page_size: int) -> None:
        self.pending: list[PageCopy] = []
        self._groups = groups
        self._page_size = page_size

    def fork(self, table: PageTable) -> Fork | None:
        """See ``BlockManager.fork``."""
        num_full, partial = divmod(table.num_written, self._page_size)
        if partial and not all(self._groups.idle_pages()):
            return None
        parts, copies = self._groups.share(table, num_full), []
        for group, part, shared in zip(self._groups, table.parts, parts, strict=True):
            if partial:
                group.extend(shared, num_full + 1)
                copies.append(self._copy(group, part.pages[num_full], shared.pages[num_full]))
        forked = PageTable(
            self._page_size,
            table.salt,
            parts,
            digests=table.digests[:num_full],
            num_written=table.num_written,
            quantize_after=table.quantize_after,
        )
        return Fork(forked, tuple(copies))

    def rollback(self, table: PageTable, num_tokens: int) -> tuple[PageCopy, ...]:
        """See ``BlockManager.rollback``."""
        assert 0 <= num_tokens <= table.num_written, f"cannot roll back to {num_tokens}"
        num_full, partial = divmod(num_tokens, self._page_size)
        table.promised = 0
        if self._groups.has_slid(table, num_tokens):
            self._groups.end_at(table, num_full)
            return ()
        self._groups.trim(table, num_full + (partial > 0))
        del table.digests[num_full:]
        table.num_written = num_tokens
        return self._own_partial_page(table, num_full) if partial else ()

    def _own_partial_page(self, table: PageTable, index: int) -> tuple[PageCopy, ...]:
        """Replace page ``index`` in the groups where others hold or find it."""
        foreign = [
            (group, part)
            for group, part in zip(self._groups, table.parts, strict=True)
            if not group.pool.is_private(PageId(part.pages[index]))
        ]
        if not all(group.pool.num_idle for group, _ in foreign):
            self._groups.end_at(table, index)
            return ()
        copies: list[PageCopy] = []
        for group, part in foreign:
            page = PageId(part.pages.pop())
            group.extend(part, index + 1)
            copies.append(self._copy(group, page, part.pages[index]))
            group.pool.drop([page])
        return tuple(copies)

    def _copy(self, group: Group, source: int, target: int) -> PageCopy:
        copy = PageCopy(PageId(source), PageId(target), group.index)
        assert all((source, group.index) != (other.target, other.group) for other in self.pending), (
            f"page {source} is not filled yet"
        )
        group.pool.hold((copy.source, copy.target))
        self.pending.append(copy)
        return copy

    def done(self, copies: Iterable[PageCopy]) -> None:
        """See ``BlockManager.copied``."""
        for copy in copies:
            self.pending.remove(copy)
            self._groups[copy.group].pool.drop([copy.target, copy.source])
