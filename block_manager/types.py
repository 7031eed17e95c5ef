from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Final, NamedTuple, NewType

PageId = NewType("PageId", int)
Digest = NewType("Digest", bytes)

NULL_PAGE: Final = PageId(0)
"""Page-table entry that replaces a page released because no later query sees it. Such an entry holds no page
and is never read; ``GroupPageTable.window_start`` tells which entries these are. Page 0 exists in every pool,
so a kernel may compute the address of a masked entry and stay inside the pool."""


class MediaSpan(NamedTuple):
    """Positions of an image or other medium in a sequence.

    digest         32 bytes that identify the medium and all other inputs of its rows
    is_bidirectional       whether one step must compute all rows, because they attend to each other
    """

    start: int
    length: int
    digest: bytes
    is_bidirectional: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.length


class PageCounts(NamedTuple):
    """Numbers of held pages, idle cached pages and idle empty pages."""

    held: int = 0
    idle_cached: int = 0
    idle_empty: int = 0


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A copy of a page from ``source`` to ``target`` in every layer of a group.

    A step makes its copies before it writes. Both pages are held until ``BlockManager.copied``.
    """

    source: PageId
    target: PageId
    group: int = 0


@dataclass(slots=True, eq=False)
class GroupPageTable:
    """One group's part of a page table.

    pages          ``pages[i]`` has positions ``[i * page_size, (i + 1) * page_size)``
    window_start   index of the first page of the window; earlier entries are ``NULL_PAGE`` or kept pages
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    window_start: int = 0


class PlannedSnapshot(NamedTuple):
    """A snapshot to take in a step: the state after ``position`` tokens, into ``slot``."""

    position: int
    slot: PageId
    is_branch: bool


@dataclass(slots=True, eq=False)
class TableState:
    """Recurrent state and snapshots of one page table.

    running    slot of the state after ``num_written`` tokens; None before ``reserve``
    found      snapshot with which the table was opened, held until it is copied
    drafted    pairs (number of tokens, slot) of the states during a draft
    """

    running: PageId | None = None
    found: PageId | None = None
    origin: PageId | None = None
    branch: int = 0
    planned: list[PlannedSnapshot] = field(default_factory=list)
    drafted: list[tuple[int, PageId]] = field(default_factory=list)
    turns: int = 0
    num_new: int = 0
    tail: PageId | None = None
    tail_digest: Digest = Digest(b"")


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one sequence by position; only BlockManager changes it.

    salt             salt of the sequence; pages are shared only between equal salts
    num_written      positions whose K/V is in memory
    capacity         positions for which pages of every group are reserved
    """

    page_size: int
    salt: bytes = b""
    parts: tuple[GroupPageTable, ...] = field(default_factory=lambda: (GroupPageTable(),))
    digests: list[Digest] = field(default_factory=list)
    num_written: int = 0
    state: TableState | None = None
    branch_points: tuple[int, ...] = ()
    capacity: int = field(init=False, default=0)
    reserved_ahead: int = field(init=False, default=0)
    media: tuple[MediaSpan, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        self.update_capacity()

    @property
    def pages(self) -> array[int]:
        return self.parts[0].pages

    def update_capacity(self) -> None:
        parts = self.parts
        num_pages = len(parts[0].pages) if len(parts) == 1 else min([len(part.pages) for part in parts])
        self.capacity = num_pages * self.page_size
