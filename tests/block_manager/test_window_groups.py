"""Layers with a window that spans two or three pages of 4 positions."""

from __future__ import annotations

import pytest

from octavo.block_manager import (
    BlockManager,
    FullAttention,
    KVGroupSpec,
    Miss,
    PageId,
    PageTable,
    Pins,
    SlidingWindow,
)
from octavo.scheduler import Limits, SampleResult, Scheduler, Sequence, SequenceTooLong

FULL = FullAttention(num_pages=16)
WINDOW = SlidingWindow(num_pages=8, window=6)
PROMPT = list(range(1, 22))  # five full pages of 4 tokens, and one more token


def manager(*groups: KVGroupSpec, max_chunk: int = 8, prefix_cache: bool = True) -> BlockManager:
    return BlockManager(groups or (FULL, WINDOW), 4, max_chunk=max_chunk, prefix_cache=prefix_cache)


def write(blocks: BlockManager, table: PageTable, tokens: list[int], chunk: int = 8) -> None:
    while table.num_written < len(tokens):
        stop = min(table.num_written + chunk, len(tokens))
        assert blocks.reserve(table, stop)
        blocks.commit(table, tokens, stop)
        blocks.check()


def written(blocks: BlockManager, tokens: list[int], salt: bytes = b"") -> PageTable:
    table = blocks.open(tokens, salt=salt)
    write(blocks, table, tokens)
    return table


def test_pages_that_no_query_sees_are_released() -> None:
    blocks = manager(prefix_cache=False)
    table = written(blocks, PROMPT[:20])  # the next query sees positions 15 to 20
    assert len(table.parts[0].pages) == len(table.parts[1].pages) == 5
    assert table.parts[1].window_start == 3
    assert blocks.held_by(table) == [
        *((0, PageId(page)) for page in table.parts[0].pages),
        *((1, PageId(page)) for page in table.parts[1].pages[3:]),
    ]
    assert blocks.idle_pages() == (11, 6)


def test_a_long_generation_holds_a_constant_number_of_window_pages() -> None:
    blocks = manager(FullAttention(num_pages=6000), SlidingWindow(num_pages=6, window=9, keep=3), max_chunk=4)
    scheduler = Scheduler(blocks, Limits(4, 1))
    sequence = Sequence("long", [1, 2, 3], max_tokens=20_000)
    scheduler.add(sequence)
    held = set()
    while (step := scheduler.plan()) is not None:
        scheduler.commit(step, [SampleResult(7) for _ in step.sampled()])
        if sequence.table is not None and sequence.num_written > 20:
            held.add(6 - blocks.idle_pages()[1])
    assert len(sequence.tokens) == 20_003
    assert held == {3, 4}, "the kept page and what the window touches"
    assert blocks.num_evicted > 4000, "the others were cached until they were needed"


def test_a_hit_needs_only_the_window_before_its_end() -> None:
    blocks = manager()
    blocks.close(written(blocks, PROMPT))
    evict(blocks, 1, 6)
    table = blocks.open([*PROMPT[:20], 99])
    assert table.num_written == 20
    assert table.parts[1].window_start == 3
    assert blocks.explain_miss(table, [*PROMPT[:20], 99]) == Miss(5, "partial_page")
    blocks.check()


def evict(blocks: BlockManager, group: int, num_pages: int) -> None:
    pool = blocks._groups[group].pool
    taken = pool.allocate(num_pages)
    assert taken is not None
    pool.decref(taken)


def test_a_hit_needs_the_cached_pages_of_the_window() -> None:
    blocks = manager()
    blocks.close(written(blocks, PROMPT[:20]))
    blocks.close(blocks.open(PROMPT[:17]))
    evict(blocks, 1, 6)
    table = blocks.open(PROMPT)
    assert (table.num_written, table.parts[1].window_start) == (16, 2)
    evict(blocks, 0, 16 - 4)
    blocks.check()


def test_a_hit_needs_the_kept_pages_too() -> None:
    blocks = manager(SlidingWindow(num_pages=8, window=6, keep=2))
    blocks.close(written(blocks, PROMPT[:20]))
    digests = blocks.open([*PROMPT[:20], 9], find=False).digests
    pool = blocks._groups[0].pool
    pool.decref(pool.acquire(digests[3:]))
    assert blocks.open([*PROMPT[:20], 9]).num_written == 20
    blocks = manager(SlidingWindow(num_pages=8, window=6, keep=2))
    blocks.close(written(blocks, PROMPT[:20]))
    pool = blocks._groups[0].pool
    pool.decref(pool.acquire(digests[3:]))
    evict(blocks, 0, 6)
    assert [pool.is_cached(digest) for digest in digests] == [False, False, False, True, True]
    assert blocks.open([*PROMPT[:20], 9]).num_written == 0


def test_a_lost_window_page_is_why_a_prompt_is_not_found() -> None:
    blocks = manager()
    blocks.close(written(blocks, PROMPT[:8]))
    evict(blocks, 1, 8)
    again = [*PROMPT[:8], 99]
    table = blocks.open(again)
    assert table.num_written == 0, "the layers that see everything have it, the others have not"
    miss = blocks.explain_miss(table, again)
    assert (miss.page, miss.reason) == (0, "evicted")
    assert blocks.num_evicted == 2


def test_forks_copy_the_partial_page_of_every_group() -> None:
    blocks = manager()
    table = written(blocks, PROMPT)
    fork = blocks.fork(table)
    assert fork is not None
    copies = blocks.take_copies()
    assert [copy.group for copy in copies] == [0, 1]
    assert [copy.source for copy in copies] == [part.pages[5] for part in table.parts]
    assert [copy.target for copy in copies] == [part.pages[5] for part in fork.parts]
    assert fork.parts[1].window_start == table.parts[1].window_start == 4
    blocks.copied(copies)
    blocks.close(table)
    write(blocks, fork, [*PROMPT, 5, 6, 7])
    blocks.close(fork)
    assert blocks.idle_pages() == (16, 8)


def test_rollback_before_the_window_finds_its_pages_or_restarts() -> None:
    blocks = manager()
    table = written(blocks, PROMPT)
    blocks.rollback(table, 11)
    assert not blocks.has_copies
    assert (table.num_written, table.parts[1].window_start) == (8, 0), "pages 0 and 1 were still cached"
    blocks.check()
    write(blocks, table, PROMPT)
    evict(blocks, 1, 8 - len([page for group, page in blocks.held_by(table) if group]))
    blocks.rollback(table, 11)
    assert not blocks.has_copies
    assert table.num_written == 0
    blocks.check()


def test_reserved_space_is_free_in_time() -> None:
    blocks = manager(FULL, SlidingWindow(num_pages=8, window=6), max_chunk=4)
    table = blocks.open(PROMPT)
    assert blocks.reserve(table, 4, ahead=len(PROMPT))
    assert [len(part.pages) for part in table.parts] == [6, 3], "all of it; a window and a chunk"
    other = blocks.open([9] * 9)
    assert blocks.reserve(other, 9)
    assert not blocks.reserve(blocks.open([8] * 9), 9)
    for stop in (3, 4, 7, 11, 12, 16, 20, 21):
        assert stop <= table.capacity
        assert blocks.reserve(table, stop, ahead=len(PROMPT))
        blocks.commit(table, PROMPT, stop)
        blocks.check()


def test_only_sequences_that_never_fit_the_pools_are_refused() -> None:
    blocks = manager(SlidingWindow(num_pages=5, window=6))
    scheduler = Scheduler(blocks, Limits(8, 2))
    scheduler.add(Sequence("endless", [1] * 1000, max_tokens=1000))
    small = manager(SlidingWindow(num_pages=3, window=6))
    with pytest.raises(SequenceTooLong, match=r"needs 17 tokens of KV .* the pool holds 12"):
        Scheduler(small, Limits(8, 2)).add(Sequence("x", [1] * 9, max_tokens=8))
    with pytest.raises(ValueError, match=r"max_step_tokens must be at most .* max_chunk of 8, got 16"):
        Scheduler(blocks, Limits(16, 2))


def test_pins_are_counted_in_the_group_that_has_most() -> None:
    blocks = BlockManager((FULL, WINDOW), 4, max_pinned=3, max_chunk=8)
    blocks.close(written(blocks, PROMPT[:12]))
    pins = Pins(blocks)
    assert pins.pin("system", PROMPT[:12]) == 12
    assert pins.num_pages == 3
    assert blocks.idle_pages() == (13, 6), "of the window's pages only those that are seen"
    assert pins.unpin("system")
    assert blocks.idle_pages() == (16, 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_pages": 0, "window": 2}, "num_pages must be at least 1, got 0"),
        ({"num_pages": 1, "window": 0}, "window must be at least 1, got 0"),
        ({"num_pages": 1, "keep": -1, "window": 2}, "keep must be at least 0"),
    ],
)
def test_invalid_window_groups_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlidingWindow(**settings)
