from __future__ import annotations

from collections import Counter, abc
from dataclasses import dataclass, field

from .manager import BlockManager
from .types import MediaSpan, PageId, PageTable

MAX_NAMES = 256

HeldPages = abc.Iterable[tuple[int, PageId]]
"""Pairs of a group's index and a page, as ``BlockManager.held_by`` returns them."""


@dataclass(frozen=True, slots=True)
class PinLimit:
    """Maximum number of pages that all pins of one owner may hold."""

    owner: str
    max_pages: int


@dataclass(slots=True)
class _Pages:
    num_pins: Counter[tuple[int, PageId]] = field(default_factory=Counter)
    by_group: Counter[int] = field(default_factory=Counter)
    max_in_group: int = 0

    def add(self, pages: HeldPages) -> None:
        for page in pages:
            self.by_group[page[0]] += not self.num_pins[page]
            self.num_pins[page] += 1
        self.max_in_group = max(self.by_group.values(), default=0)

    def remove(self, pages: HeldPages) -> None:
        for page in pages:
            self.num_pins[page] -= 1
            if not self.num_pins[page]:
                del self.num_pins[page]
                self.by_group[page[0]] -= 1
        self.max_in_group = max(self.by_group.values(), default=0)


@dataclass(slots=True)
class _Owner:
    tables: dict[str, PageTable] = field(default_factory=dict)
    pages: _Pages = field(default_factory=_Pages)


class Pins:
    """Named prefixes that stay cached.

    Pins hold at most ``max_pinned`` pages. The block manager leaves these pages out of its ``capacity``, so
    every admitted sequence fits into the other pages.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._owners: dict[str, _Owner] = {}
        self._owner_of: dict[str, str] = {}
        self._pages = _Pages()

    @property
    def num_pages(self) -> int:
        """Number of pinned pages in the group that has most of them."""
        return self._pages.max_in_group

    def kept(self, owner: str | None = None) -> dict[str, int]:
        """Return the number of pinned positions by pin name, for one owner (None: for all)."""
        owners = [self._owners.get(owner, _Owner())] if owner is not None else self._owners.values()
        return {name: table.num_written for each in owners for name, table in each.tables.items()}

    def num_pages_of(self, owner: str) -> int:
        """Return the number of pages that pins of one owner hold, in the group with most of them."""
        return self._owners[owner].pages.max_in_group if owner in self._owners else 0

    def can_add_name(self, name: str, owner: str) -> bool:
        """Return whether a pin has this name, or the owner may add one."""
        return name in self._owner_of or len(self._owners.get(owner, _Owner()).tables) < MAX_NAMES

    def pin(
        self,
        name: str,
        tokens: abc.Sequence[int],
        *,
        salt: bytes = b"",
        media: tuple[MediaSpan, ...] = (),
        limit: PinLimit | None = None,
    ) -> int | None:
        """Pin the cached full pages of these tokens; return the number of pinned positions.

        Return 0 if no page is cached. Return None, and change nothing, if a limit would be exceeded.
        Pinning an existing name replaces its pin.
        """
        blocks = self._blocks
        owner = "" if limit is None else limit.owner
        if not self.can_add_name(name, owner):
            return None
        table = blocks.open([*tokens, 0], salt=salt, media=media)
        if not table.num_written:
            blocks.close(table)
            return 0
        before = self._owner_of.get(name)
        previous = None if before is None else self._take(name)
        self._put(name, table, owner)
        too_many = self._pages.max_in_group > blocks.max_pinned
        if states := blocks.states:  # one slot must stay free for a running sequence
            too_many |= self._pages.by_group[len(blocks.groups)] >= states.num_slots
        too_many |= limit is not None and self.num_pages_of(owner) > limit.max_pages
        if too_many:
            blocks.close(self._take(name))
            if previous is not None and before is not None:
                self._put(name, previous, before)
            return None
        if previous is not None:
            blocks.close(previous)
        return table.num_written

    def unpin(self, name: str) -> bool:
        """Release a pin; return False if no pin has this name."""
        if name not in self._owner_of:
            return False
        self._blocks.close(self._take(name))
        return True

    def _put(self, name: str, table: PageTable, owner: str) -> None:
        held, each = self._blocks.held_by(table), self._owners.setdefault(owner, _Owner())
        each.tables[name], self._owner_of[name] = table, owner
        each.pages.add(held)
        self._pages.add(held)

    def _take(self, name: str) -> PageTable:
        owner = self._owner_of.pop(name)
        each = self._owners[owner]
        table = each.tables.pop(name)
        held = self._blocks.held_by(table)
        each.pages.remove(held)
        self._pages.remove(held)
        if not each.tables:
            del self._owners[owner]
        return table
