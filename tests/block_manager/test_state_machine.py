from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from octavo.block_manager import BlockManager, Digest, PageCopy, PageId, PageTable, RecurrentState

PAGE_SIZE = 3
NUM_PAGES = 14
SLOTS = 1

State = tuple[bytes, tuple[int, ...]] | str
"""(salt, tokens in the state); a string means that there is no state."""

tokens = st.lists(st.integers(1, 2), min_size=1, max_size=20)
salts = st.sampled_from([b"", b"other tenant"])


class Machine(RuleBasedStateMachine):
    """Token IDs are only 1 and 2, so that many sequences share a prefix."""

    spec = RecurrentState(num_slots=7, slot_bytes=1)
    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_PAGES, PAGE_SIZE, states=self.spec)
        self.slots: dict[int, State] = {}
        self.tokens: dict[PageTable, list[int]] = {}  # written tokens of each open table
        self.rest: dict[PageTable, list[int]] = {}
        self.junctions: dict[PageTable, int] = {}
        self.copies: list[PageCopy] = []
        self.names: dict[Digest, tuple[bytes, tuple[int, ...]]] = {}

    def carry_out(self) -> None:
        self.copies += self.blocks.take_copies()
        moved: dict[int, State] = {
            c.target: self.slots.get(c.source, "empty") for c in self.copies if c.group == SLOTS
        }
        self.slots |= moved
        self.blocks.copied(self.copies)
        self.copies = []

    def has_state(self, digest: Digest) -> bool:
        return self.blocks.find(digest, SLOTS) is not None

    @rule(target=tables, prompt=tokens, salt=salts)
    def open(self, prompt: list[int], salt: bytes) -> PageTable:
        digests = self.blocks.page_digests(prompt, [], salt=salt)
        pages = 0
        while pages < len(digests) and self.blocks.find(digests[pages]) is not None:
            pages += 1
        longest = max((n for n in range(1, pages + 1) if self.has_state(digests[n - 1])), default=0)
        table = self.blocks.open(prompt, salt=salt)
        assert table.num_written == longest * PAGE_SIZE
        self.tokens[table], self.rest[table] = prompt[: table.num_written], prompt[table.num_written :]
        self.junctions[table] = pages if pages > longest else 0
        return table

    @rule(table=tables, more=tokens, fails=st.sampled_from([False, False, False, True]))
    def step(self, table: PageTable, more: list[int], fails: bool) -> None:
        if table not in self.tokens:
            return
        rest, start = self.rest[table], table.num_written
        known = [*self.tokens[table], *(rest or more)]
        stop = min(len(known), start + len(more))
        idle = self.blocks.idle_pages()
        if not self.blocks.reserve(table, stop):
            assert self.blocks.idle_pages() == idle
            return
        self.carry_out()
        self.blocks.plan_snapshots(table, start, stop, num_known=len(known))
        self.blocks.check()
        state = table.state
        assert state is not None
        assert state.running is not None
        if start:
            assert self.slots.get(state.running) == (table.salt, tuple(known[:start])), "it goes on elsewhere"
        for position, slot, *_ in state.planned:
            assert start < position <= stop, "a snapshot of a state that the step does not pass"
            self.slots[slot] = (table.salt, tuple(known[:position]))
        self.slots[state.running] = "failed" if fails else (table.salt, tuple(known[:stop]))
        if fails:
            for planned in state.planned:
                self.slots[planned.slot] = "failed"
            self.forget(table)
            return
        room = self.blocks.idle_pages()[SLOTS]
        self.blocks.commit(table, known[:stop], stop)
        for index, digest in enumerate(table.digests[: stop // PAGE_SIZE]):
            self.names[digest] = (table.salt, tuple(known[: (index + 1) * PAGE_SIZE]))
        self.tokens[table], self.rest[table] = known[:stop], known[stop:] if rest else []
        if room:
            for page in self.wanted(table, start, stop, len(known)):
                assert self.has_state(table.digests[page - 1]), f"no snapshot after page {page}"

    def wanted(self, table: PageTable, start: int, stop: int, known: int) -> set[int]:
        if self.spec.every_page:
            return set(range(start // PAGE_SIZE + 1, stop // PAGE_SIZE + 1))
        passed = range(start // PAGE_SIZE + 1, stop // PAGE_SIZE + 1)
        return {page for page in (self.junctions[table], known // PAGE_SIZE) if page in passed}

    def forget(self, table: PageTable) -> None:
        del self.tokens[table], self.rest[table]
        self.blocks.close(table)

    @rule(target=tables, table=tables)
    def fork(self, table: PageTable) -> object:
        state = table.state
        assert state is not None
        if table not in self.tokens or state.running is None:
            return multiple()
        self.carry_out()
        idle = self.blocks.idle_pages()
        fork = self.blocks.fork(table)
        if fork is None:
            assert self.blocks.idle_pages() == idle
            return multiple()
        self.tokens[fork], self.rest[fork] = list(self.tokens[table]), []
        self.junctions[fork] = 0
        return fork

    @rule(table=tables, data=st.data())
    def rollback(self, table: PageTable, data: st.DataObject) -> None:
        if table not in self.tokens:
            return
        self.carry_out()
        wanted = data.draw(st.integers(0, table.num_written))
        self.blocks.rollback(table, wanted)
        assert table.num_written <= wanted
        if table.num_written < wanted:
            assert table.num_written % PAGE_SIZE == 0
        del self.tokens[table][table.num_written :]
        self.rest[table], self.junctions[table] = [], 0

    @rule(table=consumes(tables))
    def close(self, table: PageTable) -> None:
        if table in self.tokens:
            self.forget(table)

    @rule()
    def take(self) -> None:
        self.copies += self.blocks.take_copies()

    @precondition(lambda self: self.copies or self.blocks.has_copies)
    @rule()
    def copy(self) -> None:
        self.carry_out()

    @rule(prompt=tokens, salt=salts)
    def adopt(self, prompt: list[int], salt: bytes) -> None:
        self.carry_out()
        digests = self.blocks.page_digests([*prompt, 0], [], salt=salt)
        if not digests:
            return

        def fill(indices: list[int], slots: list[PageId]) -> None:
            for index, slot in zip(indices, slots, strict=True):
                self.slots[slot] = (salt, tuple(prompt[: (index + 1) * PAGE_SIZE]))
                self.names[digests[index]] = (salt, tuple(prompt[: (index + 1) * PAGE_SIZE]))

        used = prompt[: len(digests) * PAGE_SIZE]
        cached = all(self.blocks.find(digest) is not None for digest in digests)
        new = self.blocks.insert(used, digests, len(digests) - 1, fill, group=SLOTS, salt=salt)
        assert cached or new is None, "nobody could go on after it"

    @invariant()
    def books_balance(self) -> None:
        self.blocks.check()

    @invariant()
    def every_sequence_has_its_own_state(self) -> None:
        if self.copies or self.blocks.has_copies:
            return
        for table, written in self.tokens.items():
            assert table.num_written == len(written)
            state = table.state
            assert state is not None
            slot = state.found if state.running is None else state.running
            if written:
                assert slot is not None
                assert self.slots.get(slot) == (table.salt, tuple(written)), "a state of other tokens"

    @invariant()
    def what_can_be_found_is_what_its_name_says(self) -> None:
        (states,) = self.blocks._states
        for digest, slot in states.pool._page_of.items():
            assert self.slots.get(slot) == self.names[digest]

    def teardown(self) -> None:
        self.carry_out()
        for table in list(self.tokens):
            self.forget(table)
        self.blocks.check()
        assert self.blocks.idle_pages() == (NUM_PAGES, self.spec.num_slots)


class ScarceMachine(Machine):
    spec = RecurrentState(num_slots=3, slot_bytes=1)


class DenseMachine(Machine):
    spec = RecurrentState(num_slots=12, slot_bytes=1, every_page=True)


def test_a_snapshot_is_not_evicted_for_later_ones_of_its_prompt() -> None:
    machine = DenseMachine()
    long = machine.open(prompt=[1], salt=b"")
    machine.step(table=long, fails=False, more=[1])
    late = machine.open(prompt=[1, 2, *[1] * 7], salt=b"other tenant")
    first = machine.open(prompt=[1, 2], salt=b"other tenant")
    machine.step(table=first, fails=False, more=[1, 1])
    machine.step(table=first, fails=False, more=[1])
    machine.step(table=long, fails=False, more=[1] * 20)
    machine.step(table=late, fails=False, more=[1] * 9)
    machine.books_balance()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=30)
TestScarceMachine = ScarceMachine.TestCase
TestScarceMachine.settings = TestMachine.settings
TestDenseMachine = DenseMachine.TestCase
TestDenseMachine.settings = TestMachine.settings
