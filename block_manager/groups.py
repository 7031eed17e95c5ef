"""All groups of a model together: what one page table has in each of their pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Run

from octavo.block_manager.group import Group, page_ids
from octavo.block_manager.types import Digest, GroupPages, PageCopy, PageGroup, PageId, PageTable


class Groups:
    """Every operation reaches all groups, or none: a table covers the same positions in each."""

    def __init__(
        self,
        specs: Run[PageGroup],
        page_size: int,
        *,
        max_chunk: int,
        policy: str,
        clock: Callable[[], float],
    ) -> None:
        self.max_chunk = max_chunk
        self._page_size = page_size
        self._groups = tuple(
            Group(index, spec, page_size, policy=policy, clock=clock) for index, spec in enumerate(specs)
        )
        self._windowed = tuple(group for group in self._groups if group.spec.window is not None)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def __getitem__(self, index: int) -> Group:
        return self._groups[index]

    def idle_pages(self) -> tuple[int, ...]:
        return tuple([group.pool.num_idle for group in self._groups])

    def new_table(self, salt: bytes) -> PageTable:
        return PageTable(self._page_size, salt, tuple([GroupPages() for _ in self._groups]))

    def held(self, table: PageTable) -> list[tuple[int, PageId]]:
        """Group and page of everything a table holds."""
        return [(group.index, page) for group, part in self._parts(table) for page in group.live(part)]

    def find(self, table: PageTable, digests: Run[Digest]) -> None:
        """Give an empty table the longest beginning that every group can go on after."""
        if len(self._groups) == 1 and not self._windowed:
            table.pages.extend(self._groups[0].pool.hold_prefix(digests))
        elif num_pages := self._longest(digests, len(digests)):
            table.parts = tuple([group.find(digests, num_pages) for group in self._groups])
        table.num_written = len(table.pages) * self._page_size
        table.measure()

    def eviction(self, digests: Run[Digest], num_pages: int) -> float | None:
        """When a page was evicted without which no sequence can go on after ``num_pages`` pages."""
        for group in self._groups:
            missing = group.missing(digests, num_pages)
            evicted_at = None if missing is None else group.pool.evictions.when(digests[missing])
            if evicted_at is not None:
                return evicted_at
        return None

    def reserve(self, table: PageTable, num_tokens: int) -> bool:
        """Pages for ``num_tokens`` positions and for what was promised; or none, and False."""
        goals: list[int] = []
        for group, part in self._parts(table):
            group.release(part, table.num_written)
            goal = max(group.wanted(table, num_tokens, self.max_chunk), len(part.pages))
            if goal - len(part.pages) > group.pool.num_idle:
                table.measure()
                return False
            goals.append(goal)
        for (group, part), goal in zip(self._parts(table), goals, strict=True):
            group.extend(part, goal)
        table.measure()
        return True

    def publish(self, table: PageTable, first: int, last: int, contents: Run[bytes]) -> None:
        """Let pages ``[first, last)`` be found, by the table's digests; ``contents`` for the events."""
        parent = table.digests[first - 1] if first else None
        digests = table.digests[first:last]
        for group, part in self._parts(table):
            pages = page_ids(part.pages[first:last])
            kept = contents if group.index == 0 else ()  # its events are those that are watched
            group.pool.publish(pages, digests, parent, salt=table.salt, contents=kept)

    def slide(self, table: PageTable) -> None:
        """Give back what fell out of the windows, and take as much again where it was promised."""
        for group in self._windowed:
            part = table.parts[group.index]
            group.release(part, table.num_written)
            goal = group.wanted(table, 0, self.max_chunk)
            if 0 < goal - len(part.pages) <= group.pool.num_idle:
                group.extend(part, goal)
                table.measure()

    def share(self, table: PageTable, num_pages: int) -> tuple[GroupPages, ...]:
        return tuple([group.share(part, num_pages) for group, part in self._parts(table)])

    def has_slid(self, table: PageTable, num_tokens: int) -> bool:
        """Whether what a query at ``num_tokens`` sees was given back in part."""
        return any(
            table.parts[group.index].released > max(group.first_visible(num_tokens), group.num_kept)
            for group in self._windowed
        )

    def trim(self, table: PageTable, num_pages: int) -> None:
        for group, part in self._parts(table):
            group.trim(part, num_pages)
        table.measure()

    def end_at(self, table: PageTable, num_pages: int) -> None:
        """Shorten a table to at most so many full pages, so that every group can go on after them."""
        num_pages = self._longest(table.digests, num_pages, table)
        for group, part in self._parts(table):
            group.recover(part, table.digests, num_pages)
        del table.digests[num_pages:]
        table.num_written = num_pages * self._page_size
        table.measure()

    def flush(self) -> int:
        return sum([group.pool.flush() for group in self._groups])

    def check(self, tables: Iterable[PageTable], copies: Run[PageCopy]) -> None:
        """Raise AssertionError if a rule of README.md is broken."""
        for table in tables:
            assert 0 <= table.num_written <= table.capacity, "written where no page is reserved"
        for group in self._groups:
            self._check(group, tables, [copy for copy in copies if copy.group == group.index])

    def _check(self, group: Group, tables: Iterable[PageTable], copies: list[PageCopy]) -> None:
        group.pool.check()
        parts = [(table, table.parts[group.index]) for table in tables]
        in_tables = Counter(page for _, part in parts for page in group.live(part))
        in_copies = Counter(page for copy in copies for page in (copy.source, copy.target))
        for page in map(PageId, range(group.pool.num_pages)):
            expected = in_tables[page] + in_copies[page]
            assert group.pool.num_holders(page) == expected, f"page {page} is not held {expected} times"
        targets = Counter(copy.target for copy in copies)
        assert not targets.keys() & {copy.source for copy in copies}, "a copy reads another's target"
        assert all(count == 1 for count in targets.values()), "two copies write one page"
        for table, part in parts:
            visible = max(group.first_visible(table.num_written), group.num_kept)
            assert part.released <= visible, "a page that queries can see was given back"
            for page in page_ids(part.pages[table.num_written // self._page_size :]):
                assert in_tables[page] == 1, f"page {page} is written by one table and held by another"
                assert not group.pool.is_published(page), f"page {page} can be found and is still written"

    def _parts(self, table: PageTable) -> Iterable[tuple[Group, GroupPages]]:
        return zip(self._groups, table.parts, strict=True)

    def _longest(self, digests: Run[Digest], num_pages: int, table: PageTable | None = None) -> int:
        """See ``Group.longest``; a beginning must do for all groups."""
        parts = table.parts if table is not None else (None,) * len(self._groups)
        while True:
            shorter = num_pages
            for group, part in zip(self._groups, parts, strict=True):
                shorter = group.longest(digests, shorter, part)
            if shorter == num_pages:
                return num_pages
            num_pages = shorter
