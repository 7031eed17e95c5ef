"""The small types of the block manager: pages, digests and page tables."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NewType

PageId = NewType("PageId", int)
Digest = NewType("Digest", bytes)


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy every layer's K and V of ``source`` to ``target`` before anything else is written.

    The copy holds both pages until ``BlockManager.copied`` says that it is done, so neither
    can be handed to anybody else in between, whatever becomes of the tables.
    """

    source: PageId
    target: PageId


@dataclass(slots=True, eq=False)
class PageTable:
    """Which page holds which positions of one sequence; only BlockManager changes it.

    page_size     positions per page
    salt          who may share these pages: equal tokens with another salt never match
    pages         page of positions ``[i * page_size, (i + 1) * page_size)``; an ``array('i')``,
                  so that NumPy can copy it through the buffer protocol (copy, never keep the
                  view: an array with a view cannot grow)
    digests       of the leading full pages of the tokens, as far as they are known: always of
                  the published ones, and after ``open`` of those it looked up
    num_written   positions whose K/V is in memory
    """

    page_size: int
    salt: bytes = b""
    pages: array[int] = field(default_factory=lambda: array("i"))
    digests: list[Digest] = field(default_factory=list)
    num_written: int = 0

    @property
    def capacity(self) -> int:
        """Positions the reserved pages have room for."""
        return len(self.pages) * self.page_size

    def slot(self, position: int) -> int:
        """Where one position's K/V lives: ``page * page_size + offset``."""
        page_size = self.page_size
        return self.pages[position // page_size] * page_size + position % page_size


@dataclass(frozen=True, slots=True)
class Fork:
    """A second table with the same contents, and the copy it needs (None if no page is partial)."""

    table: PageTable
    copy: PageCopy | None
