from __future__ import annotations

import pytest

from octavo.block_manager import BlockManager, PageTable, Pins, RecurrentState
from octavo.block_manager.snapshot_order import wanted_snapshots
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.memory.state_sizing import plan_states

PAGE_SIZE = 4
MiB = 2**20


def manager(num_slots: int = 6, *, every_page: bool = False, max_pinned: int = 0) -> BlockManager:
    states = RecurrentState(num_slots=num_slots, slot_bytes=1, every_page=every_page)
    return BlockManager(64, PAGE_SIZE, states=states, max_pinned=max_pinned)


def advance(blocks: BlockManager, table: PageTable, tokens: list[int], stop: int) -> list[int]:
    assert blocks.reserve(table, stop)
    assert table.state is not None
    copies = blocks.take_copies()
    assert all(copy.target == table.state.running for copy in copies)
    blocks.copied(copies)
    blocks.plan_snapshots(table, table.num_written, stop, num_known=len(tokens))
    taken = [planned.position for planned in table.state.planned]
    blocks.commit(table, tokens, stop)
    blocks.check()
    return taken


def serve(blocks: BlockManager, tokens: list[int], *, prompt: int | None = None, step: int = 64) -> int:
    prompt = len(tokens) if prompt is None else prompt
    table = blocks.open(tokens[:prompt])
    found = table.num_written
    while table.num_written < prompt:
        advance(blocks, table, tokens[:prompt], min(table.num_written + step, prompt))
    for stop in range(prompt + 1, len(tokens) + 1):
        advance(blocks, table, tokens[:stop], stop)
    blocks.close(table)
    blocks.check()
    return found


@pytest.mark.parametrize(
    ("start", "stop", "branch", "every_page", "num_known", "pages"),
    [
        (0, 10, 0, False, 10, [2]),
        (0, 10, 0, False, 12, []),
        (0, 8, 0, False, 11, [2]),
        (0, 8, 0, False, 8, [2]),
        (8, 9, 0, False, 9, []),
        (11, 12, 0, False, 12, [3]),
        (0, 30, 3, False, 99, [3]),
        (0, 10, 1, False, 99, [1]),
        (0, 12, 3, False, 99, [3]),
        (0, 30, 3, False, 30, [3, 7]),
        (16, 30, 3, False, 30, [7]),
        (0, 17, 2, True, 99, [1, 2, 3, 4]),
    ],
)
def test_snapshots_are_taken_at_ends_and_branches(
    start: int, stop: int, branch: int, every_page: bool, num_known: int, pages: list[int]
) -> None:
    wanted = wanted_snapshots(
        start, stop, page_size=4, branch=branch, every_page=every_page, num_known=num_known
    )
    assert wanted == pages


def test_the_next_turn_of_a_conversation_continues_from_its_tail() -> None:
    blocks = manager()
    conversation = list(range(1, 24))
    assert serve(blocks, conversation, prompt=10) == 0
    assert serve(blocks, [*conversation, 90, 91, 92]) == 20
    counts = blocks.state_counts
    assert counts is not None
    assert (counts.held, counts.idle_cached) == (0, 2), "tails that a longer one replaced are gone"


def test_prompts_with_a_common_prefix_get_a_snapshot_at_the_junction() -> None:
    blocks = manager()
    common = list(range(1, 18))
    assert serve(blocks, [*common, *range(30, 39)]) == 0
    table = blocks.open([*common, *range(40, 49)])
    assert table.num_written == 0
    miss = blocks.explain_miss(table, [*common, *range(40, 49)])
    assert (miss.page, miss.reason, miss.num_pages) == (0, "no_state", 4)
    blocks.close(table)
    assert serve(blocks, [*common, *range(40, 49)]) == 0
    assert serve(blocks, [*common, *range(50, 59)]) == 16


def test_snapshot_kinds_can_be_turned_off() -> None:
    conversation, common = list(range(1, 24)), list(range(1, 18))
    kept: dict[tuple[bool, bool, bool], int] = {}
    for tail, branch, demote_earlier, next_turn, third in (
        (True, True, True, 20, 16),
        (True, True, False, 20, 16),
        (True, False, True, 20, 0),
        (False, True, True, 0, 0),
        (False, False, True, 0, 0),
    ):
        spec = RecurrentState(
            num_slots=9, slot_bytes=1, tail=tail, branch=branch, demote_earlier=demote_earlier
        )
        blocks = BlockManager(60, 4, states=spec)
        serve(blocks, conversation, prompt=10)
        assert serve(blocks, [*conversation, 90, 91, 92]) == next_turn
        counts = blocks.state_counts
        assert counts is not None
        kept[tail, branch, demote_earlier] = counts.idle_cached
        blocks = BlockManager(60, 4, states=spec)
        for last in (30, 40):
            serve(blocks, [*common, *range(last, last + 9)])
        assert serve(blocks, [*common, *range(50, 59)]) == third
    assert list(kept.values()) == [2, kept[True, True, False], 2, 0, 0]
    assert kept[True, True, False] > 2, "without stepping down, each tail stays"


def test_pages_stay_as_long_as_a_snapshot_lies_after_them() -> None:
    states = RecurrentState(num_slots=3, slot_bytes=1)
    blocks = BlockManager(64, PAGE_SIZE, states=states)
    common = list(range(1, 9))
    serve(blocks, [*common, *range(20, 30)])
    assert blocks.counts.idle_cached == 4, "no state stands in the page that is not full"
    serve(blocks, [*common, *range(30, 40)])
    serve(blocks, [*common, *range(40, 50)])
    serve(blocks, [*common, *range(50, 60)])
    counts = blocks.state_counts
    assert counts is not None
    assert (counts.idle_cached, blocks.counts.idle_cached) == (2, 4), "the junction, and the last tail"
    for last, is_cached in ((20, False), (30, False), (40, False), (50, True)):
        digests = blocks.page_digests([*common, *range(last, last + 10)], [])
        assert [blocks.find(digest) is not None for digest in digests] == [True, True, *[is_cached] * 2]


def test_an_evicted_page_takes_its_snapshot_along() -> None:
    states = RecurrentState(num_slots=30, slot_bytes=1, every_page=True)
    blocks = BlockManager(6, PAGE_SIZE, states=states)
    serve(blocks, list(range(1, 18)))
    counts = blocks.state_counts
    assert counts is not None
    assert counts.idle_cached == blocks.counts.idle_cached == 4
    serve(blocks, list(range(31, 44)))
    counts = blocks.state_counts
    assert counts is not None
    assert counts.idle_cached == blocks.counts.idle_cached == 5
    assert serve(blocks, list(range(1, 18))) == 8, "the tail's pages went first"


def test_if_pages_are_short_the_least_useful_snapshot_is_evicted() -> None:
    states = RecurrentState(num_slots=9, slot_bytes=8, page_bytes=1)
    blocks = BlockManager(16, PAGE_SIZE, states=states)
    long, short = list(range(1, 34)), list(range(41, 50))
    serve(blocks, long)
    serve(blocks, short)
    serve(blocks, list(range(61, 86)))
    assert blocks.open(short).num_written == 0, "the younger saves less for its bytes"
    assert blocks.open(long).num_written == 32
    blocks.check()


def test_without_a_slot_a_table_gets_no_pages_either() -> None:
    blocks = manager(1)
    first, second = blocks.open([1, 2, 3]), blocks.open([4, 5, 6])
    assert blocks.reserve(first, 3)
    held = blocks.counts.held
    assert not blocks.reserve(second, 3)
    assert blocks.counts.held == held
    assert blocks.fork(first) is None
    blocks.close(first)
    assert blocks.reserve(second, 3)
    blocks.check()


def test_the_only_slot_continues_from_the_snapshot_it_holds() -> None:
    blocks = manager(1)
    table = blocks.open([*range(1, 9), 9])
    advance(blocks, table, [*range(1, 9), 9], 9)
    blocks.close(table)
    assert serve(blocks, list(range(1, 9))) == 0, "with one slot nothing is left for a snapshot"
    blocks = manager(2)
    serve(blocks, list(range(1, 10)))
    other = blocks.open([77, 78])
    assert blocks.reserve(other, 2)
    table = blocks.open([*range(1, 10), 10, 11])
    assert table.num_written == 8
    assert blocks.reserve(table, 11), "the snapshot itself becomes the running slot"
    assert not blocks.has_copies
    blocks.check()


def test_rollback_ends_at_a_snapshot() -> None:
    blocks = manager(8, every_page=True)
    tokens = list(range(1, 24))
    table = blocks.open(tokens)
    advance(blocks, table, tokens, 23)
    blocks.rollback(table, 18)
    copies = blocks.take_copies()
    assert table.num_written == 16
    assert [copy.target for copy in copies] == [table.state.running] if table.state else []
    blocks.copied(copies)
    blocks.flush()
    blocks.rollback(table, 15)
    assert not blocks.has_copies
    assert table.num_written in (0, 12)
    blocks.check()


def test_rollback_before_the_first_step_releases_cached_pages() -> None:
    blocks, tokens = manager(), list(range(18))
    serve(blocks, tokens[:9])
    serve(blocks, tokens)
    table = blocks.open([*tokens, 0])
    assert table.num_written == 16
    blocks.rollback(table, 11)
    assert not blocks.has_copies
    assert table.num_written == 8
    blocks.check()
    blocks.rollback(table, 7)
    assert not blocks.has_copies
    assert advance(blocks, table, tokens[:9], 9) == [8]
    assert not blocks.has_copies
    blocks.close(table)
    blocks.check()


def test_pins_hold_snapshots_and_leave_a_slot_to_run_in() -> None:
    blocks = manager(2, max_pinned=16)
    pins = Pins(blocks)
    serve(blocks, list(range(1, 10)))
    assert pins.pin("one", list(range(1, 10))) == 8
    assert blocks.flush() == 0
    serve(blocks, list(range(41, 50)))
    assert pins.pin("two", list(range(41, 50))) == 0
    assert serve(blocks, list(range(1, 12))) == 8
    blocks.check()


@pytest.mark.parametrize(
    ("settings", "slot_bytes", "page_bytes", "slots"),
    [
        ({"state_memory": 10 * MiB}, MiB, 1000, 10),
        ({"kv_memory": 100 * MiB, "max_running": 8}, MiB, MiB // 2, 16),
        ({"kv_memory": 20 * MiB, "max_running": 8}, MiB, MiB // 2, 10),
        ({"kv_memory": 100 * MiB, "max_running": 8}, MiB, 6144, 25),
        ({"kv_memory": 100 * MiB, "max_running": 8}, MiB, 0, 16),
        ({"num_pages": 20_480, "max_running": 4}, MiB, 6144, 40),
        ({"num_pages": 100, "max_running": 8}, 500, 1000, 108),
    ],
)
def test_how_many_slots_there_are(
    settings: dict[str, int], slot_bytes: int, page_bytes: int, slots: int
) -> None:
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    states = plan_states(config, slot_bytes, page_bytes=page_bytes, available=2**34)
    assert states is not None
    assert states.num_slots == slots
    assert states.every_page == (slot_bytes <= page_bytes)
    assert plan_states(config, 0, page_bytes=page_bytes, available=2**34) is None


def test_too_little_memory_for_states_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"state_memory is 1.00 MiB, but the recurrent state .* 1.00 MiB"):
        plan_states(EngineConfig(state_memory=MiB), MiB, page_bytes=9, available=2**34)
    with pytest.raises(InvalidConfig, match=r"take 4.00 GiB, but only 1.00 GiB"):
        plan_states(EngineConfig(state_memory=2**32), MiB, page_bytes=9, available=2**30)


def draft(blocks: BlockManager, table: PageTable, known: list[int], drafts: list[int]) -> list[int]:
    stop, end = len(known), len(known) + len(drafts)
    assert blocks.reserve(table, end)
    limit = blocks.num_draftable(1)
    assert limit is not None
    assert len(drafts) <= limit
    blocks.plan_drafts(table, stop, len(drafts))
    blocks.plan_snapshots(table, stop - 1, end, num_known=end)
    blocks.check()
    assert table.state is not None
    assert table.state.running is not None
    slots = dict(table.state.drafted)
    assert list(slots) == list(range(stop, end))
    return [*slots.values(), table.state.running]


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_a_sequence_continues_after_its_last_accepted_draft(num_right: int) -> None:
    blocks = manager(12)
    tokens = list(range(1, 30))
    table = blocks.open(tokens[:10])
    advance(blocks, table, tokens[:10], 10)
    slots = draft(blocks, table, tokens[:11], tokens[11:14])  # a page is full after 12 tokens
    blocks.commit(table, tokens, 11 + num_right)
    blocks.rollback(table, table.num_written)
    assert not blocks.has_copies
    blocks.check()
    assert table.state is not None
    assert table.state.running == slots[num_right]
    assert blocks.held_by(table)[-1] == (1, slots[num_right]), "it holds no other slot"
    blocks.close(table)
    table = blocks.open(tokens)
    assert table.num_written == (12 if num_right else 8), "the state after a wrong draft is found"
    blocks.close(table)
    counts = blocks.state_counts
    assert counts is not None
    assert counts.held == 0


def test_drafts_leave_slots_for_cached_states_and_snapshots() -> None:
    blocks = manager(12)
    assert blocks.num_draftable(1) == 6
    assert blocks.num_draftable(8) == 4, "each of eight may need one for a snapshot"
    assert blocks.num_draftable(40) == 0
    assert BlockManager(8, PAGE_SIZE).num_draftable(1) is None
    tokens = list(range(1, 30))
    table = blocks.open(tokens[:3])
    advance(blocks, table, tokens[:3], 3)
    draft(blocks, table, tokens[:4], tokens[4:9])
    assert blocks.num_draftable(1) == 1
    blocks.close(table)
    blocks.check()
    assert blocks.num_draftable(1) == 6


def test_speculation_gets_slots_for_drafts() -> None:
    plain = EngineConfig(kv_memory=1000 * MiB, max_running=4)
    asked = EngineConfig(kv_memory=1000 * MiB, max_running=4, speculate="ngram")
    for config, count in ((plain, 8), (asked, 40)):
        states = plan_states(config, MiB, page_bytes=MiB // 2, available=2**34)
        assert states is not None
        assert states.num_slots == count
