"""The small types of the block manager: pages, digests, groups and page tables."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NewType

PageId = NewType("PageId", int)
Digest = NewType("Digest", bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGroup:
    """Layers that keep the same positions, and so share page tables and a pool of their own.

    num_pages   size of the pool
    window      queries at position p see positions > p - window (None: all up to p)
    keep        the first ``keep`` positions stay visible whatever the window
    twin_of     index of another group of the same layers, which stores the same rows in fewer bits: this
                one has them in 16 bits, as far as queries read them so. They read whole pages: from the
                page of position p - window + 1 on, and before a table's ``quantize_after`` whatever
                the other group's window shows
    """

    num_pages: int
    window: int | None = None
    keep: int = 0
    twin_of: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that describe no layer."""
        if self.num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {self.num_pages}; give the pool more memory")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}; None sees everything")
        if self.keep < 0 or (self.keep and self.window is None):
            raise ValueError(f"keep must be at least 0 and needs a window, got {self.keep}")
        if self.twin_of is not None and self.window is None:
            raise ValueError("a twin needs a window: without one, nothing is read in fewer bits")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCounts:
    """How the pages of some pools stand: held by somebody; not, and cached or empty."""

    held: int = 0
    idle_cached: int = 0
    idle_empty: int = 0


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy K and V of ``source`` to ``target`` in every layer of a group before anything else is
    written.

    The copy holds both pages until ``BlockManager.copied`` says that it is done, so neither
    can be handed to anybody else in between, whatever becomes of the tables.
    """

    source: PageId
    target: PageId
    group: int = 0


@dataclass(slots=True, eq=False)
class GroupPages:
    """One group's part of a page table.

    pages      page of positions ``[i * page_size, (i + 1) * page_size)``; an ``array('i')``, so
               that NumPy can copy it through the buffer protocol (copy, never keep the view: an
               array with a view cannot grow)
    released   pages before this one, but for the group's kept ones, were given back: no query
               sees them any more, and their entries are 0
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    released: int = 0


@dataclass(slots=True, eq=False)
class PageTable:
    """Which page holds which positions of one sequence; only BlockManager changes it.

    page_size     positions per page
    salt          who may share these pages: equal tokens with another salt never match
    parts         the pages, per group of layers
    digests       of the leading full pages of the tokens, as far as they are known: always of
                  the published ones, and after ``open`` of those it looked up
    num_written   positions whose K/V is in memory
    quantize_after   queries before this position read 16-bit pages alone, where there are twins
    capacity      positions that the reserved pages of every group have room for
    promised      positions that ``reserve`` was asked to have room for in time
    """

    page_size: int
    salt: bytes = b""
    parts: tuple[GroupPages, ...] = field(default_factory=lambda: (GroupPages(),))
    digests: list[Digest] = field(default_factory=list)
    num_written: int = 0
    quantize_after: int = 0
    capacity: int = field(init=False, default=0)
    promised: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.measure()

    @property
    def pages(self) -> array[int]:
        """The first group's."""
        return self.parts[0].pages

    def measure(self) -> None:
        """Bring ``capacity`` up to date with the pages."""
        self.capacity = min([len(part.pages) for part in self.parts]) * self.page_size

    def slot(self, position: int, group: int = 0) -> int:
        """Where one position's K/V lives in a group: ``page * page_size + offset``."""
        page_size = self.page_size
        return self.parts[group].pages[position // page_size] * page_size + position % page_size


@dataclass(frozen=True, slots=True)
class Fork:
    """A second table with the same contents, and the copies it needs (none if no page is partial)."""

    table: PageTable
    copies: tuple[PageCopy, ...]
