"""A test model that stores, per slot, all tokens that its K/V depends on.

Real K/V of one position is a function of all earlier tokens. The ledger stores these tokens instead of
numbers, and checks them at each attended position. So errors in page tables, hashing, eviction, forks or
aborts become visibly wrong contents."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from octavo.block_manager import FullAttention, KVGroupSpec, PageCopy, PageTable, ResidualWindow
from octavo.block_manager.types import GroupPageTable
from octavo.scheduler import ScheduledChunk, SchedulerOutput, Sequence

VOCABULARY = 5
END = 0  # the token that ends a sequence

Entry = tuple[bytes, tuple[int, ...]] | str


def slot_of(table: PageTable, position: int, group: int = 0) -> int:
    """Return the slot of a position's K/V in a group: ``page * page_size + offset``."""
    page, offset = divmod(position, table.page_size)
    return table.parts[group].pages[page] * table.page_size + offset


def next_token(tokens: Iterable[int], seed: str) -> int:
    """Return the model's next token: a fixed function of all tokens and the seed."""
    return zlib.crc32(repr((list(tokens), seed)).encode()) % VOCABULARY


def served_alone(prompt: list[int], max_tokens: int, seed: str) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]


class Ledger:
    """Slots of each group's pool, each with the tokens that determine its K/V."""

    def __init__(self, page_size: int, groups: Iterable[KVGroupSpec] = (FullAttention(num_pages=1),)) -> None:
        self.page_size = page_size
        self.groups = tuple(groups)
        self._states: dict[int, Entry] = {}
        self._slots: dict[tuple[int, int], Entry] = {}

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Make all copies at once, like one gather and one scatter."""
        size = self.page_size
        moved = {
            (copy.group, copy.target * size + offset): self._slots.get(
                (copy.group, copy.source * size + offset), "empty"
            )
            for copy in copies
            for offset in range(size)
        }
        self._slots.update(moved)
        behind = len(self.groups)
        self._states |= {
            copy.target: self._states.get(copy.source, "empty") for copy in copies if copy.group == behind
        }

    def write(
        self,
        table: PageTable,
        tokens: list[int],
        positions: range,
        *,
        salt: bytes = b"",
        broken: bool = False,
    ) -> None:
        """Write K/V of some positions; a failed step writes invalid contents."""
        for position in positions:
            entry: Entry = (salt, tuple(tokens[: position + 1]))
            for group in range(len(self.groups)):
                self._slots[group, slot_of(table, position, group)] = "poison" if broken else entry

    def check(
        self,
        table: PageTable,
        tokens: list[int],
        num_tokens: int,
        *,
        first_query: int | None = None,
        salt: bytes = b"",
    ) -> None:
        """Raise AssertionError unless visible positions in ``tokens[:num_tokens]`` have correct K/V.

        ``first_query``: first position that attends; None: the next token."""
        first_query = num_tokens if first_query is None else first_query
        for group, spec in enumerate(self.groups):
            for position in range(num_tokens):
                if not visible(self.groups, spec, first_query, position, page_size=self.page_size):
                    continue
                entry = self._slots.get((group, slot_of(table, position, group)), "empty")
                expected = (salt, tuple(tokens[: position + 1]))
                assert entry == expected, f"position {position}: expected {expected}, found {entry}"

    def spoil(self, slots: Iterable[tuple[int, int]]) -> None:
        self._slots.update(dict.fromkeys(slots, "poison"))

    def fill(self, group: int, page: int, tokens: list[int], positions: range, salt: bytes) -> None:
        for offset, position in enumerate(positions):
            self._slots[group, page * self.page_size + offset] = (salt, tuple(tokens[: position + 1]))

    def check_page(self, group: int, page: int, tokens: list[int], salt: bytes) -> None:
        """Raise AssertionError unless a full page holds the last positions of ``tokens``."""
        first = len(tokens) - self.page_size
        for offset in range(self.page_size):
            entry = self._slots.get((group, page * self.page_size + offset), "empty")
            expected = (salt, tuple(tokens[: first + offset + 1]))
            assert entry == expected, f"page {page} is found as {expected} and holds {entry}"

    def run(
        self, step: SchedulerOutput, live: Iterable[Sequence], broken: frozenset[Sequence] = frozenset()
    ) -> None:
        """Compute a step: copies, then every write, then every read."""
        self.copy(step.copies)
        holders = [self._holders(live, group) for group in range(len(self.groups))]
        for item in step.work:
            table = item.sequence.table
            assert table is not None, "planned without pages"
            for position in range(item.start, item.end):
                for part, held in zip(table.parts, holders, strict=True):
                    page = part.pages[position // self.page_size]
                    assert held[page] == 1, f"page {page} is written and has {held[page]} holders"
            self.write(
                table,
                [*item.sequence.tokens[: item.stop], *item.drafts],
                range(item.start, item.end),
                salt=item.sequence.salt,
                broken=item.sequence in broken,
            )
            self._advance(item, broken=item.sequence in broken)
        for item in step.work:
            sequence = item.sequence
            assert sequence.table is not None
            if sequence not in broken:
                self.check(
                    sequence.table,
                    [*sequence.tokens[: item.stop], *item.drafts],
                    item.end,
                    first_query=item.start,
                    salt=sequence.salt,
                )

    def _advance(self, item: ScheduledChunk, *, broken: bool) -> None:
        """Advance one sequence's recurrent state to the step's end, with snapshots on the way."""
        sequence, table = item.sequence, item.sequence.table
        if table is None or (state := table.state) is None:
            return
        assert state.running is not None, "computed without a slot"
        if item.start:
            self.check_state(table, sequence.tokens, item.start, sequence.salt)
        tokens = [*sequence.tokens[: item.stop], *item.drafts]
        assert [position for position, _ in state.drafted] == [*range(item.stop, item.end)]
        for position, slot, *_ in [*state.planned, *state.drafted]:
            assert item.start < position <= item.end, "a copy of a state that the step does not pass"
            self._states[slot] = "poison" if broken else (sequence.salt, tuple(tokens[:position]))
        self._states[state.running] = "poison" if broken else (sequence.salt, tuple(tokens))

    def check_state(self, table: PageTable, tokens: list[int], num_tokens: int, salt: bytes) -> None:
        """Raise AssertionError unless a table's slot holds the state after ``tokens[:num_tokens]``."""
        assert table.state is not None
        assert table.state.running is not None
        found = self._states.get(table.state.running, "empty")
        expected = (salt, tuple(tokens[:num_tokens]))
        assert found == expected, f"the state is that of {found}, expected {expected}"

    def _holders(self, live: Iterable[Sequence], group: int) -> dict[int, int]:
        holders: dict[int, int] = {}
        kept = -(-self.groups[group].keep // self.page_size)
        for sequence in live:
            part = sequence.table.parts[group] if sequence.table is not None else GroupPageTable()
            for index, page in enumerate(part.pages):
                if index < kept or index >= part.window_start:
                    holders[page] = holders.get(page, 0) + 1
        return holders


def visible(
    groups: tuple[KVGroupSpec, ...], group: KVGroupSpec, query: int, position: int, *, page_size: int
) -> bool:
    """Return whether ``query`` or a later query sees a position, by the definition of the layers."""
    if isinstance(group, ResidualWindow):
        if not _in_window(groups[group.residual_of], query, position):
            return False
        if query < group.quantize_after or position < group.keep:
            return True
        position += page_size - 1 - position % page_size  # whole pages are read
    return _in_window(group, query, position)


def _in_window(group: KVGroupSpec, query: int, position: int) -> bool:
    return group.window is None or position > query - group.window or position < group.keep
