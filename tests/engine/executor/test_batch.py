from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import slot_of
from octavo.block_manager import (
    BlockManager,
    FullAttention,
    PageCopy,
    PageId,
    PageTable,
    ResidualWindow,
    SlidingWindow,
)
from octavo.block_manager.types import GroupPageTable
from octavo.engine.executor.batch import build_batch, slice_rows
from octavo.scheduler import Limits, SampleResult, ScheduledChunk, Scheduler, SchedulerOutput, Sequence


def make_work(
    pages: list[int],
    size: int,
    start: int,
    stop: int,
    *,
    samples: bool,
    num_parallel_samples: int,
    num_groups: int = 1,
) -> ScheduledChunk:
    sequence = Sequence("s", [7 * page + 3 for page in range(stop)], 4)
    parts = tuple(
        GroupPageTable(array("i", [(page + group) % 64 for page in pages])) for group in range(num_groups)
    )
    sequence.table = PageTable(size, parts=parts, num_written=start)
    parallel_samples = tuple(Sequence("t", list(sequence.tokens), 4) for _ in range(num_parallel_samples))
    return ScheduledChunk(sequence, start, stop, samples, parallel_samples)


@st.composite
def steps(draw: st.DrawFn) -> tuple[SchedulerOutput, int]:
    size = draw(st.sampled_from([1, 2, 4, 32]))
    free = draw(st.permutations(range(64)))
    work, decodes, num_groups = [], draw(st.booleans()), draw(st.integers(1, 3))
    plain = decodes and draw(st.booleans())
    for _ in range(draw(st.integers(1, 8))):
        count = draw(st.integers(1, 6))
        pages, free = free[:count], free[count:]
        stop = draw(st.integers(1, count * size))
        start = stop - 1 if decodes else draw(st.integers(0, stop - 1))
        samples = plain or draw(st.booleans())
        parallel_samples = draw(st.integers(0, 3)) if samples and not plain else 0
        work.append(
            make_work(
                list(pages),
                size,
                start,
                stop,
                samples=samples,
                num_parallel_samples=parallel_samples,
                num_groups=num_groups,
            )
        )
    said = plain and draw(st.booleans())
    return SchedulerOutput(tuple(work), (PageCopy(PageId(1), PageId(2)),), decode_only=said), size


@given(steps())
def test_a_batch_equals_one_position_at_a_time(case: tuple[SchedulerOutput, int]) -> None:
    step, size = case
    batch = build_batch(step, size)
    tokens, positions, slots, q_start, sample_rows = [], [], [], [0], []
    for item in step.work:
        assert item.sequence.table is not None
        for position in range(item.start, item.stop):
            tokens.append(item.sequence.tokens[position])
            positions.append(position)
            slots.append(slot_of(item.sequence.table, position))
        q_start.append(len(tokens))
        if item.samples:
            sample_rows += [len(tokens) - 1] * (1 + len(item.parallel_samples))
    assert batch.token_ids.tolist() == tokens
    assert batch.attention.positions.tolist() == positions
    assert batch.attention.groups[0].slots.tolist() == slots
    assert batch.attention.q_start.tolist() == q_start
    assert batch.attention.kv_len.tolist() == [item.stop for item in step.work]
    assert batch.sample_rows.tolist() == sample_rows
    assert len(batch.sample_rows) == len(step.sampled())
    assert batch.copies == step.copies
    for item, row in zip(step.work, batch.attention.groups[0].page_table.tolist(), strict=True):
        assert item.sequence.table is not None
        used = -(-item.stop // size)
        assert row[:used] == item.sequence.table.pages[:used].tolist()
        assert not any(row[used:])
    assert {len(batch.attention.groups)} == {
        len(item.sequence.table.parts) for item in step.work if item.sequence.table
    }
    for group, metadata in enumerate(batch.attention.groups):
        tables = [item.sequence.table for item in step.work if item.sequence.table is not None]
        expected = [
            slot_of(table, position, group)
            for table, item in zip(tables, step.work, strict=True)
            for position in range(item.start, item.stop)
        ]
        assert metadata.slots.tolist() == expected
        assert metadata.starts is None
        batch.attention.select((group,)).check(64)
    arrays = (batch.token_ids, batch.sample_rows)
    assert all(values.dtype == np.int32 for values in arrays)


@given(steps(), st.integers(1, 40), st.sampled_from([0, 3, 50]), st.integers(0, 7))
def test_residual_pages_start_where_their_groups_window_does(
    case: tuple[SchedulerOutput, int], window: int, after: int, first: int
) -> None:
    step, size = case
    residual = ResidualWindow(num_pages=64, window=window, residual_of=0, quantize_after=after)
    if not (work := tuple(item for item in step.work if len(_parts(item)) == 2)):
        return
    batch = build_batch(step._replace(work=work), size, (FullAttention(num_pages=64), residual)).attention
    starts = batch.groups[1].starts
    assert batch.groups[0].starts is None
    assert (starts is None) == (after == 0), "kernels know where a window alone begins"
    if starts is not None:
        expected = [residual.first_visible(at) // size * size for at in batch.positions.tolist()]
        assert starts.tolist() == expected
        first = min(first, len(expected) - 1)
        part = slice_rows(batch, first, len(expected)).groups[1].starts
        assert part is not None
        assert part.tolist() == expected[first:]
        batch.select((1,)).check(64)


def _parts(item: ScheduledChunk) -> tuple[GroupPageTable, ...]:
    assert item.sequence.table is not None
    return item.sequence.table.parts


@pytest.mark.parametrize("start", [0, 1], ids=["chunks", "decodes"])
def test_two_writers_of_one_slot_are_our_own_bug(start: int) -> None:
    work = [make_work([3], 4, start, 2, samples=True, num_parallel_samples=0) for _ in range(2)]
    with pytest.raises(AssertionError, match="one slot"):
        build_batch(SchedulerOutput(tuple(work)), 4)


def test_every_group_has_its_own_pages_in_the_batch() -> None:
    groups = (FullAttention(num_pages=16), SlidingWindow(num_pages=8, window=6))
    scheduler = Scheduler(BlockManager(groups, 4, max_chunk=8), Limits(8, 2))
    scheduler.add(Sequence("a", [1] * 21, max_tokens=2))
    for _ in range(3):
        step = scheduler.plan()
        assert step is not None
        batch = build_batch(step, 4)
        scheduler.commit(step, [SampleResult(7) for _ in step.sampled()])
    assert step is not None
    table = step.work[0].sequence.table
    assert table is not None
    for metadata, part in zip(batch.attention.groups, table.parts, strict=True):
        assert metadata.page_table.tolist() == [part.pages[:6].tolist()] or part.window_start
        assert metadata.slots.tolist() == [
            metadata.page_table[0, position // 4] * 4 + position % 4
            for position in batch.attention.positions.tolist()
        ]
