"""The small types of the block manager: pages, digests and page tables."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Final, NamedTuple, NewType

PageId = NewType("PageId", int)
Digest = NewType("Digest", bytes)

NULL_PAGE: Final = PageId(0)
"""Entry of a page table whose page was freed because no later query sees it. ``GroupPageTable.window_start``
says which entries these are; nobody holds or reads a page by them. It is a page id like any other, so that
a kernel that computes the address of what it then masks stays inside the pool."""


class PageCounts(NamedTuple):
    """How the pages of some pools stand: held by somebody; idle, and cached or empty."""

    held: int = 0
    idle_cached: int = 0
    idle_empty: int = 0


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy K and V of ``source`` to ``target`` in every layer of a group.

    That comes before anything else is written.

    The copy holds both pages until ``BlockManager.copied`` says that it is done, so neither
    can be handed to anybody else in between, whatever becomes of the tables.
    """

    source: PageId
    target: PageId
    group: int = 0


@dataclass(slots=True, eq=False)
class GroupPageTable:
    """One group's part of a page table.

    pages          page of positions ``[i * page_size, (i + 1) * page_size)``; an ``array('i')``, so
                   that NumPy can copy it through the buffer protocol (copy, never keep the view: an
                   array with a view cannot grow)
    window_start   entries before this one, but for the group's kept ones, are ``NULL_PAGE``: no query
                   sees their positions any more, and their pages were given back
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    window_start: int = 0


class PlannedSnapshot(NamedTuple):
    """A snapshot that a step takes: of the state after ``position`` tokens, in ``slot``.

    is_junction   pages were found up to there
    """

    position: int
    slot: PageId
    is_junction: bool


@dataclass(slots=True, eq=False)
class TableState:
    """A table's part of the recurrent state.

    running    its slot: the state after ``num_written`` tokens; None before ``reserve``
    found      the snapshot it was opened with, held until the running slot is filled from it
    origin     that snapshot afterwards, not held
    junction   pages that were found beyond the snapshot: the sequence takes one there
    planned    snapshots of the step that is being computed
    drafted    slots for the states that step passes after its last known token and after every draft but the
               last, with the number of tokens each stands after
    turns      how often its conversation went on from a snapshot, as far as is known
    num_new    pages of its prompt behind the last of those
    tail       its last published snapshot, and its digest; not held
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
    """Which page holds which positions of one sequence; only BlockManager changes it.

    Whoever commits thousands of rows a second may set ``num_written`` itself where ``BlockManager.commit``
    does no more.

    page_size        positions per page
    salt             who may share these pages: equal tokens with another salt never match
    parts            the pages, per group of layers
    digests          of the leading full pages of the tokens, as far as they are known: always of
                     the published ones, and after ``open`` of those it looked up. The very list that
                     ``open`` was given, if it was: what a table learns outlives it
    num_written      positions whose K/V is in memory
    capacity         positions that the reserved pages of every group have room for
    reserved_ahead   positions that ``reserve`` was asked to have room for in time
    state            of recurrent layers; None for models without any
    partings         where sequences are known to leave each other, in pages from the beginning: where this
                     one went on from what was found, and how far groups without a window had it
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

    def __post_init__(self) -> None:
        self.update_capacity()

    @property
    def pages(self) -> array[int]:
        """The first group's."""
        return self.parts[0].pages

    def update_capacity(self) -> None:
        """Bring ``capacity`` up to date with the pages."""
        parts = self.parts
        num_pages = len(parts[0].pages) if len(parts) == 1 else min([len(part.pages) for part in parts])
        self.capacity = num_pages * self.page_size
