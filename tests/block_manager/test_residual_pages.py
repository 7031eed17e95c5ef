from __future__ import annotations

import pytest

from ledger import Ledger, next_token
from octavo.block_manager import BlockManager, FullAttention, PageTable, ResidualWindow, SlidingWindow
from octavo.scheduler import Limits, SampleResult, Scheduler, Sequence, SequenceTooLong

PAGES = FullAttention(num_pages=16)
PROMPT = list(range(1, 22))  # five full pages of 4 tokens, and one more token


def manager(residual: int, *, window: int = 1, keep: int = 0, quantize_after: int = 0) -> BlockManager:
    beside = ResidualWindow(
        num_pages=residual, window=window, keep=keep, residual_of=0, quantize_after=quantize_after
    )
    return BlockManager((PAGES, beside), 4, max_chunk=8)


def write(blocks: BlockManager, table: PageTable, tokens: list[int], chunk: int = 8) -> None:
    while table.num_written < len(tokens):
        stop = min(table.num_written + chunk, len(tokens))
        assert blocks.reserve(table, stop)
        blocks.commit(table, tokens, stop)
        blocks.check()


def num_residual(blocks: BlockManager) -> int:
    return blocks.groups[1].num_pages - blocks.idle_pages()[1]


def test_only_the_page_being_written_has_a_residual_page() -> None:
    blocks = manager(4)
    table = blocks.open(PROMPT)
    for length in range(1, 22):
        write(blocks, table, PROMPT[:length])
        assert num_residual(blocks) == (1 if length % 4 else 0), "a full page has none"
    assert blocks.counts.held == 6


def test_kept_and_recent_pages_have_residual_pages() -> None:
    blocks = manager(6, window=5, keep=3)
    write(blocks, table := blocks.open(PROMPT), PROMPT)
    held = {page for group, page in blocks.held_by(table) if group == 1}
    assert held == {table.parts[1].pages[index] for index in (0, 4, 5)}


def test_residual_pages_are_released_beyond_quantize_after() -> None:
    blocks = manager(8, quantize_after=14)
    table = blocks.open(PROMPT)
    write(blocks, table, PROMPT[:13], chunk=1)
    assert num_residual(blocks) == 4
    write(blocks, table, PROMPT[:16], chunk=1)
    assert num_residual(blocks) == 0


def test_a_hit_needs_the_kept_residual_pages_and_no_others() -> None:
    blocks = manager(4, keep=4)
    write(blocks, first := blocks.open(PROMPT), PROMPT)
    blocks.close(first)
    again = blocks.open(PROMPT)
    assert again.num_written == 20
    assert num_residual(blocks) == 1
    blocks.close(again)
    write(blocks, other := blocks.open([9] * 16), [9] * 16)
    write(blocks, another := blocks.open([8] * 5), [8] * 5)
    assert blocks.find(first.digests[0] if first.digests else again.digests[0]) is not None
    assert blocks.open(PROMPT).num_written in (0, 20)
    blocks.close(other)
    blocks.close(another)
    blocks.check()


def test_before_quantize_after_a_hit_needs_every_residual_page() -> None:
    blocks = manager(8, quantize_after=100)
    write(blocks, first := blocks.open(PROMPT), PROMPT)
    blocks.close(first)
    again = blocks.open(PROMPT)
    assert (again.num_written, num_residual(blocks)) == (20, 5)
    blocks.close(again)
    blocks.flush()
    assert blocks.open(PROMPT).num_written == 0


def test_a_fork_copies_the_residual_page_of_the_partial_page_too() -> None:
    blocks = manager(4)
    write(blocks, table := blocks.open(PROMPT), PROMPT)
    fork = blocks.fork(table)
    assert fork is not None
    copies = blocks.take_copies()
    assert [copy.group for copy in copies] == [0, 1]
    assert num_residual(blocks) == 2
    blocks.copied(copies)
    blocks.check()


def test_a_rollback_into_a_quantized_page_ends_at_its_start() -> None:
    blocks = manager(4)
    write(blocks, table := blocks.open(PROMPT), PROMPT)
    blocks.rollback(table, 18)
    assert not blocks.has_copies
    assert table.num_written == 16
    blocks.check()
    blocks.close(table)
    blocks = manager(4)
    write(blocks, table := blocks.open(PROMPT), PROMPT[:19])
    blocks.rollback(table, 17)
    assert not blocks.has_copies
    assert table.num_written == 17, "a page that is still being written has one"


@pytest.mark.parametrize("num_residual", [3, 4, 5])
def test_with_hardly_any_residual_pages_every_request_ends(num_residual: int) -> None:
    groups = (FullAttention(num_pages=40), ResidualWindow(num_pages=num_residual, window=1, residual_of=0))
    blocks, ledger = BlockManager(groups, 4, max_chunk=8), Ledger(4, groups)
    scheduler = Scheduler(blocks, Limits(max_step_tokens=8, max_running=6))
    sequences = [Sequence(str(i), [i + 1] * (3 * i + 1), max_tokens=20) for i in range(6)]
    for sequence in sequences:
        scheduler.add(sequence)
    most = 0
    while (step := scheduler.plan()) is not None:
        most = max(most, scheduler.num_running)
        ledger.run(step, sequences)
        scheduler.commit(step, [SampleResult(1 + next_token(s.tokens, "")) for s in step.sampled()])
        blocks.check()
    assert all(len(s.tokens) == s.num_prompt + 20 for s in sequences)
    assert 1 < most <= num_residual, "each of them writes a page"
    assert blocks.idle_pages() == (40, num_residual)


def test_sequences_that_never_fit_in_16_bits_are_refused() -> None:
    limits, sequence = Limits(max_step_tokens=8, max_running=2), Sequence("long", PROMPT, max_tokens=20)
    Scheduler(manager(5), limits).check_fits(sequence)
    with pytest.raises(SequenceTooLong, match=r"41 tokens of KV .* holds 20;"):
        Scheduler(manager(5, quantize_after=60), limits).check_fits(sequence)


def test_a_residual_window_sees_part_of_its_groups_window() -> None:
    window = SlidingWindow(num_pages=9, window=6, keep=2)
    for residual, message in (
        (ResidualWindow(num_pages=9, window=1, residual_of=0, outer_window=6), "have the same keep"),
        (ResidualWindow(num_pages=9, window=1, keep=2, residual_of=0), "must name that window"),
        (ResidualWindow(num_pages=9, window=1, keep=2, residual_of=1), "not itself a residual window"),
        (ResidualWindow(num_pages=9, window=1, keep=2, residual_of=2), "the index of a group"),
        (ResidualWindow(num_pages=9, window=1, keep=2, residual_of=-1), "the index of a group"),
    ):
        with pytest.raises(ValueError, match=message):
            BlockManager((window, residual), 4)
    with pytest.raises(ValueError, match="must be at most its group's, 6, got 7"):
        ResidualWindow(num_pages=9, window=7, keep=2, residual_of=0, outer_window=6)
    BlockManager((window, ResidualWindow(num_pages=9, window=6, keep=2, residual_of=0, outer_window=6)), 4)
