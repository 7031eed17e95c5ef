"""A model for tests that remembers, per slot, everything its K/V depends on.

Real K/V of one position is a function of all tokens up to it. The ledger stores those tokens
themselves (and the salt they may be shared under) instead of numbers, and checks every
position that is attended to. Any error in page tables, holders, hashing, eviction, forks or
aborts becomes visibly wrong contents, so "served together equals served alone" is exact.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from octavo.block_manager import PageCopy, PageTable
from octavo.scheduler import Sequence, Step

VOCABULARY = 5
END = 0  # the token that ends a sequence

Entry = tuple[bytes, tuple[int, ...]] | str


def next_token(tokens: Iterable[int], seed: str) -> int:
    """What "the model" says: a fixed function of all tokens and of the sequence's seed."""
    return zlib.crc32(repr((list(tokens), seed)).encode()) % VOCABULARY


def served_alone(prompt: list[int], max_tokens: int, seed: str) -> list[int]:
    """The tokens a sequence gets when nobody else is there: what it must get in any company."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]


class Ledger:
    """Slots of a pool, each with the tokens its K/V was computed from."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._slots: dict[int, Entry] = {}

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Carry out copies all at once, as one gather and one scatter would."""
        size = self.page_size
        moved = {
            copy.target * size + offset: self._slots.get(copy.source * size + offset, "empty")
            for copy in copies
            for offset in range(size)
        }
        self._slots.update(moved)

    def write(
        self,
        table: PageTable,
        tokens: list[int],
        positions: range,
        *,
        salt: bytes = b"",
        broken: bool = False,
    ) -> None:
        """Compute the K/V of some positions; a broken computation leaves poison.

        salt   the caller's, which the table's ought to be
        """
        for position in positions:
            entry: Entry = (salt, tuple(tokens[: position + 1]))
            self._slots[table.slot(position)] = "poison" if broken else entry

    def check(self, table: PageTable, tokens: list[int], num_tokens: int, *, salt: bytes = b"") -> None:
        """Raise AssertionError unless the table leads to the K/V of ``tokens[:num_tokens]``."""
        for position in range(num_tokens):
            entry = self._slots.get(table.slot(position), "empty")
            expected = (salt, tuple(tokens[: position + 1]))
            assert entry == expected, f"position {position}: expected {expected}, found {entry}"

    def run(self, step: Step, live: Iterable[Sequence], broken: frozenset[Sequence] = frozenset()) -> None:
        """Compute a step: copies, then every write, then every read."""
        self.copy(step.copies)
        holders: dict[int, int] = {}
        for sequence in live:
            for page in sequence.table.pages if sequence.table is not None else ():
                holders[page] = holders.get(page, 0) + 1
        for item in step.work:
            table = item.sequence.table
            assert table is not None, "planned without pages"
            for position in range(item.start, item.stop):
                page = table.pages[position // self.page_size]
                assert holders[page] == 1, f"page {page} is written and has {holders[page]} holders"
            self.write(
                table,
                item.sequence.tokens,
                range(item.start, item.stop),
                salt=item.sequence.salt,
                broken=item.sequence in broken,
            )
        for item in step.work:
            sequence = item.sequence
            assert sequence.table is not None
            if sequence not in broken:
                self.check(sequence.table, sequence.tokens, item.stop, salt=sequence.salt)
