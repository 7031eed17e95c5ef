"""All groups of a model together: what one page table has in each of their pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Run

from .group import Group, page_ids
from .types import (
    Digest,
    GroupPages,
    PageCopy,
    PageCounts,
    PageGroup,
    PageId,
    PageTable,
)


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
        for spec in specs:
            _check_twin(spec, specs)
        self.max_chunk = max_chunk
        self._page_size = page_size
        self._groups = tuple(
            Group(index, specs, page_size, policy=policy, clock=clock) for index in range(len(specs))
        )
        self._windowed = tuple(group for group in self._groups if group.spec.window is not None)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def __getitem__(self, index: int) -> Group:
        return self._groups[index]

    def idle_pages(self) -> tuple[int, ...]:
        return tuple([group.pool.num_idle for group in self._groups])

    def twin_counts(self) -> PageCounts | None:
        """Of all twins together; None if there are none."""
        pools = [group.pool for group in self._groups if group.spec.twin_of is not None]
        if not pools:
            return None
        return PageCounts(
            held=sum([pool.num_pages - pool.num_idle for pool in pools]),
            idle_cached=sum([pool.num_idle_cached for pool in pools]),
            idle_empty=sum([pool.num_idle_empty for pool in pools]),
        )

    def new_table(self, salt: bytes, quantize_after: int) -> PageTable:
        parts = tuple([GroupPages() for _ in self._groups])
        return PageTable(self._page_size, salt, parts, quantize_after=quantize_after)

    def held(self, table: PageTable) -> list[tuple[int, PageId]]:
        """Group and page of everything a table holds."""
        return [(group.index, page) for group, part in self._parts(table) for page in group.live(part)]

    def find(self, table: PageTable, digests: Run[Digest]) -> None:
        """Give an empty table the longest beginning that every group can go on after."""
        if len(self._groups) == 1 and not self._windowed:
            table.pages.extend(self._groups[0].pool.hold_prefix(digests))
        elif num_pages := self._longest(table, digests, len(digests), new=True):
            after = table.quantize_after
            table.parts = tuple([group.find(digests, num_pages, after) for group in self._groups])
        table.num_written = len(table.pages) * self._page_size
        table.measure()

    def eviction(self, table: PageTable, num_pages: int) -> float | None:
        """When a page was evicted without which no sequence can go on after ``num_pages`` pages."""
        for group in self._groups:
            missing = group.missing(table, num_pages)
            evicted_at = None if missing is None else group.pool.evictions.when(table.digests[missing])
            if evicted_at is not None:
                return evicted_at
        return None

    def reserve(self, table: PageTable, num_tokens: int) -> bool:
        """Pages for ``num_tokens`` positions and for what was promised; or none, and False."""
        short: list[tuple[Group, GroupPages, int]] = []  # of pages, and how many there should be
        for group, part in self._parts(table):
            group.release(table)
            goal, num_pages = group.wanted(table, num_tokens, self.max_chunk), len(part.pages)
            if goal <= num_pages:
                continue
            if goal - num_pages > group.pool.num_idle:
                table.measure()
                return False
            short.append((group, part, goal))
        for group, part, goal in short:
            group.extend(part, goal)
        table.measure()
        return True

    def publish(self, table: PageTable, first: int, last: int, contents: Run[bytes]) -> None:
        """Let pages ``[first, last)`` be found, by the table's digests; ``contents`` for the events."""
        parent = table.digests[first - 1] if first else None
        digests = table.digests[first:last]
        for group, part in self._parts(table):
            count = min(last, group.num_findable(table.quantize_after)) - first
            if count <= 0:
                continue
            pages = page_ids(part.pages[first : first + count])
            kept = contents if group.index == 0 else ()  # its events are those that are watched
            group.pool.publish(pages, digests[:count], parent, salt=table.salt, contents=kept)

    def slide(self, table: PageTable) -> None:
        """Give back what fell out of the windows, and take as much again where it was promised."""
        for group in self._windowed:
            part = table.parts[group.index]
            group.release(table)
            goal = group.wanted(table, 0, self.max_chunk)
            if 0 < goal - len(part.pages) <= group.pool.num_idle:
                group.extend(part, goal)
                table.measure()

    def share(self, table: PageTable, num_pages: int) -> tuple[GroupPages, ...]:
        return tuple([group.share(part, num_pages) for group, part in self._parts(table)])

    def has_slid(self, table: PageTable, num_tokens: int) -> bool:
        """Whether what a query at ``num_tokens`` sees was given back in part."""
        return any(
            table.parts[group.index].released
            > max(group.first_visible(num_tokens, table.quantize_after), group.num_kept)
            for group in self._windowed
        )

    def trim(self, table: PageTable, num_pages: int) -> None:
        for group, part in self._parts(table):
            group.trim(part, num_pages)
        table.measure()

    def end_at(self, table: PageTable, num_pages: int) -> None:
        """Shorten a table to at most so many full pages, so that every group can go on after them."""
        num_pages = self._longest(table, table.digests, num_pages, new=False)
        for group in self._groups:
            group.recover(table, num_pages)
        del table.digests[num_pages:]
        table.num_written = num_pages * self._page_size
        table.measure()

    def num_findable(self, digests: Run[Digest], quantize_after: int) -> int:
        """How many pages ``find`` would give a table."""
        return self._longest(self.new_table(b"", quantize_after), digests, len(digests), new=True)

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
            visible = max(group.first_visible(table.num_written, table.quantize_after), group.num_kept)
            assert part.released <= visible, "a page that queries can see was given back"
            for page in page_ids(part.pages[table.num_written // self._page_size :]):
                assert in_tables[page] == 1, f"page {page} is written by one table and held by another"
                assert not group.pool.is_published(page), f"page {page} can be found and is still written"

    def _parts(self, table: PageTable) -> Iterable[tuple[Group, GroupPages]]:
        return zip(self._groups, table.parts, strict=True)

    def _longest(self, table: PageTable, digests: Run[Digest], num_pages: int, *, new: bool) -> int:
        """See ``Group.longest``; a beginning must do for all groups."""
        while True:
            shorter = num_pages
            for group in self._groups:
                shorter = group.longest(table, digests, shorter, new=new)
            if shorter == num_pages:
                return num_pages
            num_pages = shorter


def _check_twin(spec: PageGroup, specs: Run[PageGroup]) -> None:
    """Raise ValueError unless a twin shows a part of what the group does that it is a twin of: what has
    been given back is then never seen again."""
    if spec.twin_of is None:
        return
    assert spec.window is not None
    if not 0 <= spec.twin_of < len(specs) or (outer := specs[spec.twin_of]).twin_of is not None:
        raise ValueError(f"twin_of must be the index of a group that is no twin, got {spec.twin_of}")
    if outer.window is not None and (spec.window > outer.window or spec.keep != outer.keep):
        raise ValueError(
            f"a twin of a group of window {outer.window}, keep {outer.keep} must have at most that window "
            f"and the same keep, got window {spec.window}, keep {spec.keep}"
        )
