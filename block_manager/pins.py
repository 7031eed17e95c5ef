from __future__ import annotations

from collections import Counter, abc
from dataclasses import dataclass
from typing import NamedTuple

from .manager import BlockManager
from .types import MediaSpan, PageTable

MAX_NAMES = 256


@dataclass(frozen=True, slots=True)
class PinLimit:
    """Maximum number of pages that all pins of one owner may hold."""

    owner: str
    max_pages: int


class _Pin(NamedTuple):
    owner: str
    table: PageTable


class Pins:
    """Named prefixes that stay cached.

    Pins hold at most ``max_pinned`` pages. The block manager leaves these pages out of its ``capacity``, so
    every admitted sequence fits into the other pages.

    num_pages   number of pinned pages in the group that has most of them
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.num_pages = 0
        self._blocks = blocks
        self._pins: dict[str, _Pin] = {}

    def kept(self, owner: str | None = None) -> dict[str, int]:
        """Return the number of pinned positions by pin name, for one owner (None: for all)."""
        return {name: pin.table.num_written for name, pin in self._pins.items() if owner in (None, pin.owner)}

    def num_pages_of(self, owner: str) -> int:
        """Return the number of pages that pins of one owner hold, in the group with most of them."""
        return max(self._pages_by_group(owner).values(), default=0)

    def can_add_name(self, name: str, owner: str) -> bool:
        """Return whether a pin has this name, or the owner may add one."""
        return name in self._pins or len(self.kept(owner)) < MAX_NAMES

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
        blocks, before = self._blocks, self._pins
        owner = "" if limit is None else limit.owner
        if not self.can_add_name(name, owner):
            return None
        table = blocks.open([*tokens, 0], salt=salt, media=media)
        if not table.num_written:
            blocks.close(table)
            return 0
        self._pins = {**before, name: _Pin(owner, table)}
        by_group = self._pages_by_group()
        too_many = max(by_group.values()) > blocks.max_pinned
        if states := blocks.states:  # one slot must stay free for a running sequence
            too_many |= by_group[len(blocks.groups)] >= states.num_slots
        too_many |= limit is not None and self.num_pages_of(owner) > limit.max_pages
        if too_many:
            blocks.close(table)
            self._pins = before
            return None
        if name in before:
            blocks.close(before[name].table)
        self.num_pages = max(by_group.values())
        return table.num_written

    def unpin(self, name: str) -> bool:
        """Release a pin; return False if no pin has this name."""
        if name not in self._pins:
            return False
        self._blocks.close(self._pins.pop(name).table)
        self.num_pages = max(self._pages_by_group().values(), default=0)
        return True

    def _pages_by_group(self, owner: str | None = None) -> Counter[int]:
        tables = [pin.table for pin in self._pins.values() if owner in (None, pin.owner)]
        return Counter(group for group, _ in {page for each in tables for page in self._blocks.held_by(each)})
