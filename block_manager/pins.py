from __future__ import annotations

from collections import Counter, abc, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from .manager import BlockManager
from .types import MediaSpan, PageId, PageTable

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
        self._pins_by_owner = defaultdict[str | None, Counter[tuple[int, PageId]]](Counter)
        self._pages_by_owner = defaultdict[str | None, Counter[int]](Counter)

    def kept(self, owner: str | None = None) -> dict[str, int]:
        """Return the number of pinned positions by pin name, for one owner (None: for all)."""
        return {name: pin.table.num_written for name, pin in self._pins.items() if owner in (None, pin.owner)}

    def num_pages_of(self, owner: str | None) -> int:
        """Return the number of pages that pins of one owner (None: of all) hold, in the group with most."""
        return max(self._pages_by_owner[owner].values(), default=0)

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
        blocks = self._blocks
        owner = "" if limit is None else limit.owner
        if not self.can_add_name(name, owner):
            return None
        table = blocks.open([*tokens, 0], salt=salt, media=media)
        if not table.num_written:
            blocks.close(table)
            return 0
        previous, pin = self._pins.get(name), _Pin(owner, table)
        self._count(previous, -1)
        self._count(pin, 1)
        too_many = self.num_pages > blocks.max_pinned
        if states := blocks.states:  # one slot must stay free for a running sequence
            too_many |= self._pages_by_owner[None][len(blocks.groups)] >= states.num_slots
        too_many |= limit is not None and self.num_pages_of(owner) > limit.max_pages
        if too_many:
            self._count(pin, -1)
            self._count(previous, 1)
            blocks.close(table)
            return None
        self._pins[name] = pin
        if previous is not None:
            blocks.close(previous.table)
        return table.num_written

    def unpin(self, name: str) -> bool:
        """Release a pin; return False if no pin has this name."""
        pin = self._pins.pop(name, None)
        self._count(pin, -1)
        if pin is not None:
            self._blocks.close(pin.table)
        return pin is not None

    def _count(self, pin: _Pin | None, change: int) -> None:
        if pin is None:
            return
        held = self._blocks.held_by(pin.table)
        for owner in (None, pin.owner):
            num_pins, num_pages = self._pins_by_owner[owner], self._pages_by_owner[owner]
            for page in held:
                before = num_pins[page]
                after = before + change
                if not before or not after:
                    num_pages[page[0]] += change
                if after:
                    num_pins[page] = after
                else:
                    del num_pins[page]
        self.num_pages = self.num_pages_of(None)
