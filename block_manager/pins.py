"""Prefixes that stay: held like an open table's pages, so that no policy may give them up."""

from __future__ import annotations

from collections import Counter, abc
from dataclasses import dataclass

from .manager import BlockManager
from .types import PageId, PageTable


@dataclass(frozen=True, slots=True)
class PinLimit:
    """The pages that all pins may keep together whose names begin with ``owner``."""

    owner: str
    max_pages: int


class Pins:
    """Named prefixes, together at most ``blocks.max_pinned`` pages.

    The room that the block manager keeps out of ``capacity``, so that no sequence is let in that only fits
    where a pin may be."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._tables: dict[str, PageTable] = {}
        self._num_pins: Counter[tuple[int, PageId]] = Counter()  # by group and page

    @property
    def num_pages(self) -> int:
        """Pages that are pinned, those of several pins once; of the group that has most."""
        return _most(self._num_pins)

    def kept(self) -> dict[str, int]:
        """Positions that are kept, by name."""
        return {name: table.num_written for name, table in self._tables.items()}

    def num_pages_of(self, owner: str) -> int:
        """Pages of the pins whose names begin like this."""
        return _most(self._held_by_owner(owner))

    def pin(
        self, name: str, tokens: abc.Sequence[int], *, salt: bytes = b"", limit: PinLimit | None = None
    ) -> int | None:
        """Keep what is cached of these tokens, full pages only.

        Returns how many positions that is: 0, and no change, if nothing is.

        None, and no change, if that would be more pages than may be pinned, in all or by
        ``limit``. A name that is pinned already is pinned anew.
        """
        blocks = self._blocks
        table = blocks.open([*tokens, 0], salt=salt)  # one more, because the last is never looked up
        if not table.num_written:
            blocks.close(table)
            return 0
        previous = self._tables.get(name)
        after = self._num_pins + Counter(blocks.held_by(table))
        after.subtract(blocks.held_by(previous) if previous is not None else ())
        after = +after
        slots = sum(group == len(blocks.groups) for group, _ in after)  # of recurrent states
        too_many = _most(after) > blocks.max_pinned
        too_many |= blocks.states is not None and slots >= blocks.states.num_slots  # one is left to run in
        if limit is not None and not too_many:
            own = self._held_by_owner(limit.owner, but=name) + Counter(blocks.held_by(table))
            too_many = _most(own) > limit.max_pages
        if too_many:
            blocks.close(table)
            return None
        if previous is not None:
            blocks.close(previous)
        self._tables[name] = table
        self._num_pins = after
        return table.num_written

    def unpin(self, name: str) -> bool:
        """Let the pages go; False if nothing has this name."""
        table = self._tables.pop(name, None)
        if table is None:
            return False
        self._num_pins.subtract(self._blocks.held_by(table))
        self._num_pins = +self._num_pins
        self._blocks.close(table)
        return True

    def _held_by_owner(self, owner: str, *, but: str | None = None) -> Counter[tuple[int, PageId]]:
        """By group and page, how many of an owner's pins hold it; ``but`` one of them."""
        tables = (t for name, t in self._tables.items() if name.startswith(owner) and name != but)
        return Counter(page for table in tables for page in self._blocks.held_by(table))


def _most(pages: Counter[tuple[int, PageId]]) -> int:
    """How many different pages the group has that has most of them."""
    return max(Counter(group for group, _ in pages).values(), default=0)
