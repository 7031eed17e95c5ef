from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

import octavo_lab.policies  # noqa: F401 (registers policies)
from ledger import Ledger
from octavo.block_manager import (
    BlockManager,
    Digest,
    FullAttention,
    KVGroupSpec,
    PageCopy,
    PageId,
    PageTable,
    ResidualWindow,
    SlidingWindow,
)

pytestmark = pytest.mark.property

PAGE_SIZE = 4
NUM_PAGES = 12

Prefix = tuple[bytes, tuple[int, ...]]
"""A salt, and the tokens up to a page's end."""

tokens = st.lists(st.integers(1, 2), min_size=1, max_size=24)
salts = st.sampled_from([b"", b"other tenant"])


class Machine(RuleBasedStateMachine):
    policy = "lru"
    groups: tuple[KVGroupSpec, ...] = (FullAttention(num_pages=NUM_PAGES),)
    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(self.groups, PAGE_SIZE, policy=self.policy, max_chunk=24)
        self.ledger = Ledger(PAGE_SIZE, self.groups)
        self.tokens: dict[PageTable, list[int]] = {}  # written tokens of each open table
        self.salts: dict[PageTable, bytes] = {}
        self.rest: dict[PageTable, list[int]] = {}
        self.copies: list[PageCopy] = []
        self.names: dict[Digest, Prefix] = {}
        self.digests: dict[Prefix, Digest] = {}

    def name(self, digests: list[Digest], written: list[int], salt: bytes) -> None:
        for index, digest in enumerate(digests):
            prefix = (salt, tuple(written[: (index + 1) * PAGE_SIZE]))
            assert self.names.setdefault(digest, prefix) == prefix, "one name for two contents"
            assert self.digests.setdefault(prefix, digest) == digest, "two names for one prefix"

    def carry_out(self) -> None:
        self.copies += self.blocks.take_copies()
        self.ledger.copy(self.copies)
        self.blocks.copied(self.copies)
        self.copies = []

    @rule(target=tables, prompt=tokens, salt=salts)
    def open(self, prompt: list[int], salt: bytes) -> PageTable:
        table = self.blocks.open(prompt, salt=salt)
        assert table.num_written < len(prompt), "the last token is always left to compute"
        assert table.num_written % PAGE_SIZE == 0
        self.salts[table] = salt
        self.tokens[table], self.rest[table] = prompt[: table.num_written], prompt[table.num_written :]
        return table

    @rule(table=tables, more=tokens)
    def write(self, table: PageTable, more: list[int]) -> None:
        self.carry_out()
        rest = self.rest[table]
        wanted = self.tokens[table] + (rest[: len(more)] or more)
        idle, lengths = self.blocks.idle_pages(), [len(part.pages) for part in table.parts]
        short = [
            -(-len(wanted) // PAGE_SIZE) - length > num for length, num in zip(lengths, idle, strict=True)
        ]
        fits = self.blocks.reserve(table, len(wanted))
        assert fits >= (not any(short))
        assert fits <= all(
            not missing or group.window for missing, group in zip(short, self.groups, strict=True)
        ), "only what fell out of a window can make room"
        assert (len(wanted) > table.capacity) == (not fits)
        if not fits:
            assert [len(part.pages) for part in table.parts] == lengths
            return
        self.ledger.write(table, wanted, range(table.num_written, len(wanted)), salt=self.salts[table])
        self.blocks.commit(table, wanted, len(wanted))
        self.name(table.digests[: len(wanted) // PAGE_SIZE], wanted, self.salts[table])
        self.tokens[table], self.rest[table] = wanted, rest[len(more) :]

    @rule(prompt=tokens, salt=salts, data=st.data())
    def adopt(self, prompt: list[int], salt: bytes, data: st.DataObject) -> None:
        self.carry_out()
        group = data.draw(st.sampled_from(range(len(self.groups))))
        digests = self.blocks.page_digests([*prompt, 0], [], salt=salt)
        first = data.draw(st.integers(0, len(digests)))
        self.name(digests, prompt, salt)
        idle, filled = self.blocks.idle_pages(), list[int]()

        def fill(indices: list[int], pages: list[PageId]) -> None:
            filled.extend(indices)
            for index, page in zip(indices, pages, strict=True):
                self.ledger.fill(group, page, prompt, range(index * PAGE_SIZE, (index + 1) * PAGE_SIZE), salt)

        found = [self.blocks.find(digest, group) is not None for digest in digests]
        new = self.blocks.insert(
            prompt[: len(digests) * PAGE_SIZE], digests, first, fill, group=group, salt=salt
        )
        missing = [index for index in range(first, len(digests)) if not found[index]]
        assert filled == (missing if new else [])
        assert new in (None, len(missing))
        if self.groups[group].window is None and not all(found[:first]):
            assert new is None, "nobody could go on after them"
        elif len(missing) <= idle[group] - sum(found):
            assert new is not None, "there was room, whatever of the sequence is idle itself"
        assert self.blocks.idle_pages() == idle, "nobody holds them"
        for index, digest in enumerate(digests):
            now = self.blocks.find(digest, group) is not None
            assert now >= found[index], "what could be found of the sequence gave way to the rest of it"
            assert now >= (new is not None and index >= first)

    @rule(target=tables, table=tables)
    def fork(self, table: PageTable) -> object:
        if self.blocks.has_copies or any(copy.target in table.pages for copy in self.copies):
            self.carry_out()
        idle = min(self.blocks.idle_pages())
        fork = self.blocks.fork(table)
        partial = table.num_written % PAGE_SIZE > 0
        assert (fork is None) == (partial and idle == 0)
        if fork is None:
            return multiple()
        assert self.blocks.has_copies == partial
        self.salts[fork] = self.salts[table]
        self.tokens[fork], self.rest[fork] = list(self.tokens[table]), []
        return fork

    @rule()
    def take(self) -> None:
        self.copies += self.blocks.take_copies()

    @rule(table=tables, data=st.data())
    def rollback(self, table: PageTable, data: st.DataObject) -> None:
        self.carry_out()
        num_tokens = data.draw(st.integers(0, table.num_written))
        self.blocks.rollback(table, num_tokens)
        assert table.num_written == num_tokens or table.num_written % PAGE_SIZE == 0
        assert table.num_written <= num_tokens
        if not any(group.window for group in self.groups):
            assert table.num_written >= num_tokens // PAGE_SIZE * PAGE_SIZE
            assert table.num_written == num_tokens or self.blocks.num_idle <= 1, (
                "trimmed further beside idle pages"
            )
        del self.tokens[table][table.num_written :]
        self.rest[table] = []

    @rule(table=consumes(tables))
    def close(self, table: PageTable) -> None:
        del self.tokens[table]
        self.blocks.close(table)

    @precondition(lambda self: self.copies or self.blocks.has_copies)
    @rule()
    def copy(self) -> None:
        self.carry_out()

    @invariant()
    def books_balance(self) -> None:
        self.blocks.check()

    @invariant()
    def every_table_leads_to_its_own_contents(self) -> None:
        if not (self.copies or self.blocks.has_copies):
            for table, written in self.tokens.items():
                assert table.num_written == len(written)
                self.ledger.check(table, written, len(written), salt=self.salts[table])

    @invariant()
    def what_can_be_found_is_what_its_name_says(self) -> None:
        for group in self.blocks._groups:
            for digest, page in group.pool._page_of.items():
                salt, written = self.names[digest]
                self.ledger.check_page(group.index, page, list(written), salt)

    def teardown(self) -> None:
        self.carry_out()
        for table in self.tokens:
            self.blocks.close(table)
        self.blocks.check()
        assert self.blocks.counts.held == 0
        assert self.blocks.idle_pages() == tuple(group.num_pages for group in self.groups)


class LfuMachine(Machine):
    policy = "lfu"


class WindowMachine(Machine):
    groups = (FullAttention(num_pages=NUM_PAGES), SlidingWindow(num_pages=9, window=6))


class KeepingMachine(Machine):
    groups = (
        SlidingWindow(num_pages=10, window=9, keep=2),
        SlidingWindow(num_pages=NUM_PAGES, window=1, keep=5),
    )


class ResidualMachine(Machine):
    groups = (
        FullAttention(num_pages=NUM_PAGES),
        ResidualWindow(num_pages=7, window=1, keep=3, residual_of=0, quantize_after=10),
    )


class WindowResidualMachine(Machine):
    groups = (
        FullAttention(num_pages=NUM_PAGES),
        SlidingWindow(num_pages=9, window=6, keep=1),
        ResidualWindow(num_pages=NUM_PAGES, window=5, residual_of=0, quantize_after=9),
        ResidualWindow(num_pages=8, window=1, keep=1, residual_of=1, outer_window=6, quantize_after=9),
    )


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=settings().max_examples // 3, stateful_step_count=30)
TestLfuMachine = LfuMachine.TestCase
TestLfuMachine.settings = TestMachine.settings
TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = TestMachine.settings
TestKeepingMachine = KeepingMachine.TestCase
TestKeepingMachine.settings = TestMachine.settings
TestResidualMachine = ResidualMachine.TestCase
TestResidualMachine.settings = TestMachine.settings
TestWindowResidualMachine = WindowResidualMachine.TestCase
TestWindowResidualMachine.settings = TestMachine.settings


@given(st.integers(1, 8), st.lists(st.integers(0, 3), min_size=1, max_size=40), salts)
def test_a_repeated_prompt_shares_every_full_page(page_size: int, prompt: list[int], salt: bytes) -> None:
    """Safety tests alone would pass with a cache that never hits."""
    blocks = BlockManager(64, page_size)
    first = blocks.open(prompt, salt=salt)
    assert blocks.reserve(first, len(prompt))
    blocks.commit(first, prompt, len(prompt))
    shared = list(first.pages[: (len(prompt) - 1) // page_size])

    again = blocks.open(prompt, salt=salt)
    assert list(again.pages) == shared
    assert again.num_written == len(shared) * page_size
    blocks.close(first)
    blocks.close(again)
    after = blocks.open(prompt, salt=salt)
    assert list(after.pages) == shared, "idle pages are still found"
    assert not blocks.open(prompt, salt=salt + b"x").pages, "and not by another salt"
    blocks.check()


@given(
    st.integers(1, 4),
    st.lists(st.integers(0, 1), min_size=1, max_size=24),
    st.lists(st.integers(0, 1), min_size=1, max_size=24),
)
def test_exactly_the_common_full_pages_are_shared(page_size: int, one: list[int], other: list[int]) -> None:
    blocks = BlockManager(64, page_size)
    table = blocks.open(one)
    assert blocks.reserve(table, len(one))
    blocks.commit(table, one, len(one))
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    common = min(len(one), len(other)) if common is None else common
    found = blocks.open(other)
    assert found.num_written == min(common, len(other) - 1) // page_size * page_size
    assert found.pages == table.pages[: len(found.pages)]


@given(st.lists(st.integers(0, 1), min_size=1, max_size=24), st.lists(st.integers(1, 5), max_size=12))
def test_digests_do_not_depend_on_the_pieces_a_sequence_was_written_in(
    prompt: list[int], pieces: list[int]
) -> None:
    blocks = BlockManager(64, 2)
    table = blocks.open(prompt[:1])
    done = 0
    for piece in [*pieces, len(prompt)]:
        done = min(done + piece, len(prompt))
        assert blocks.reserve(table, done)
        blocks.commit(table, prompt[:done], done)
    assert blocks.open([*prompt, 9]).pages == table.pages[: len(prompt) // 2]
