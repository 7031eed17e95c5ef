from __future__ import annotations

from collections import Counter, abc

from .kv_group import KVGroup, page_ids
from .types import NULL_PAGE, PageCopy, PageId, PageTable


def check_ref_counts(
    groups: abc.Iterable[KVGroup],
    page_size: int,
    tables: abc.Iterable[PageTable],
    copies: abc.Sequence[PageCopy],
) -> None:
    """Raise AssertionError if a rule of README.md is broken."""
    for table in tables:
        assert 0 <= table.num_written <= table.capacity, "written where no page is reserved"
    for group in groups:
        group.pool.check()
        _check_group(group, page_size, tables, [copy for copy in copies if copy.group == group.index])


def _check_group(
    group: KVGroup, page_size: int, tables: abc.Iterable[PageTable], copies: list[PageCopy]
) -> None:
    parts = [(table, table.parts[group.index]) for table in tables]
    in_tables = Counter(page for _, part in parts for page in group.live(part))
    in_copies = Counter(page for copy in copies for page in (copy.source, copy.target))
    for page in map(PageId, range(group.pool.num_pages)):
        expected = in_tables[page] + in_copies[page]
        assert group.pool.ref_count(page) == expected, f"page {page} is not held {expected} times"
    targets = Counter(copy.target for copy in copies)
    assert not targets.keys() & {copy.source for copy in copies}, "a copy reads another's target"
    assert all(count == 1 for count in targets.values()), "two copies write one page"
    for table, part in parts:
        visible = max(group.first_visible_page(table.num_written), group.num_sink_pages)
        assert part.window_start <= visible, "a page that queries can see was released"
        freed = part.pages[group.num_sink_pages : part.window_start]
        assert all(page == NULL_PAGE for page in freed), "an entry names a released page"
        for page in page_ids(part.pages[table.num_written // page_size :]):
            assert in_tables[page] == 1, f"page {page} is written by one table and held by another"
            assert not group.pool.is_published(page), f"page {page} is published but still written"
