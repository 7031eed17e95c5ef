"""Basic types of the block manager: pages, digests and page tables."""

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
    """Positions of a medium, such as an image: their K and V depend on more than the tokens.

    start, length  the first position and the number of positions
    digest         32 bytes that identify the medium and all other inputs of its rows
    is_whole       the medium's rows attend to each other, so one step must compute all of them
    """

    start: int
    length: int
    digest: bytes
    is_whole: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.length


class PageCounts(NamedTuple):
    """Numbers of pages that are held, idle and cached, or idle and empty."""

    held: int = 0
    idle_cached: int = 0
    idle_empty: int = 0


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy of a page's contents from ``source`` to ``target`` in every layer of a group.

    A step makes its copies before it writes anything else. The copy holds both pages until
    ``BlockManager.copied`` is called with it. So neither page can be allocated in between, even if the tables
    that hold it close.
    """

    source: PageId
    target: PageId
    group: int = 0


@dataclass(slots=True, eq=False)
class GroupPageTable:
    """One group's part of a page table.

    pages          ``pages[i]`` has positions ``[i * page_size, (i + 1) * page_size)``. An ``array('i')``, so
                   that NumPy can copy it through the buffer protocol (copy, never keep the view: an
                   array with a view cannot grow)
    window_start   index of the first page of the window. Entries before it, apart from the group's kept
                   pages, are ``NULL_PAGE``
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    window_start: int = 0


class PlannedSnapshot(NamedTuple):
    """A snapshot to take in a step: the state after ``position`` tokens, into ``slot``.

    is_junction   cached pages, but no snapshots, reach up to there
    """

    position: int
    slot: PageId
    is_junction: bool


@dataclass(slots=True, eq=False)
class TableState:
    """The recurrent state of one page table, and its snapshots.

    running    slot of the state after ``num_written`` tokens; None before ``reserve``
    found      snapshot with which the table was opened, held until the running slot is filled from it
    origin     the snapshot that was in ``found`` before; the table no longer holds it
    junction   number of cached pages found. If they reach beyond ``found``, another snapshot is taken there
    planned    snapshots that the current step takes
    drafted    pairs (number of tokens, slot) of the states after the last known token and after every draft
               but the last
    turns      how often the conversation was continued before, as far as known
    num_new    number of pages of the prompt after the last known snapshot of the conversation
    tail       the table's last published snapshot, which the table does not hold
    tail_digest   digest of ``tail``
    """

    running: PageId | None = None
    found: PageId | None = None
    origin: PageId | None = None
    junction: int = 0
    planned: list[PlannedSnapshot] = field(default_factory=list)
    drafted: list[tuple[int, PageId]] = field(default_factory=list)
    turns: int = 0
    num_new: int = 0
    tail: PageId | None = None
    tail_digest: Digest = Digest(b"")


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one sequence by position; only BlockManager changes it.

    As an exception, a caller that commits thousands of rows per second may set ``num_written`` itself if
    ``BlockManager.commit`` would do nothing else.

    page_size        positions per page
    salt             salt of the sequence; equal tokens with another salt never match
    media            images of the sequence; digests of pages with their rows, and of all later pages,
                     depend on them
    parts            the pages of each group of layers
    digests          known digests of the first full pages: those published and, after ``open``, those
                     looked up. If ``open`` got a list, this is that list
    num_written      positions whose K/V is in memory
    capacity         positions for which pages of every group are reserved
    reserved_ahead   positions for which ``reserve`` was called ahead of time
    state            state of recurrent layers; None for models without any
    partings         known branch points, as numbers of pages: where this sequence continued from cached
                     pages, and how far its pages were cached in groups without a window
    """

    page_size: int
    salt: bytes = b""
    parts: tuple[GroupPageTable, ...] = field(default_factory=lambda: (GroupPageTable(),))
    digests: list[Digest] = field(default_factory=list)
    num_written: int = 0
    state: TableState | None = None
    partings: tuple[int, ...] = ()
    capacity: int = field(init=False, default=0)
    reserved_ahead: int = field(init=False, default=0)
    media: tuple[MediaSpan, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        self.update_capacity()

    @property
    def pages(self) -> array[int]:
        """Pages of the first group."""
        return self.parts[0].pages

    def update_capacity(self) -> None:
        """Compute ``capacity`` from the pages."""
        parts = self.parts
        num_pages = len(parts[0].pages) if len(parts) == 1 else min([len(part.pages) for part in parts])
        self.capacity = num_pages * self.page_size
