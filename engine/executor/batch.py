"""One step as the runner sees it: flat arrays, no requests and no policy."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from octavo.block_manager import PageCopy, PageTable
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata, Ints, StateMetadata
from octavo.scheduler import ScheduledChunk, SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """P rows whose logits say how likely the prompt's next token was.

    rows     [P]  rows of the step, ascending
    targets  [P]  the token that follows each
    num_top  [P]  how many of the likeliest tokens are asked for
    """

    rows: Ints
    targets: Ints
    num_top: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """T tokens of a mixed step.

    token_ids    [T]  input tokens, rows in the order of ``attention``; 0 where ``sources`` names them
    sample_rows  [S]  rows whose logits become tokens; a row appears once per sample drawn
                      from it (n > 1 draws several from the prompt's last row). A sequence with
                      drafts has its last token's row and those of the drafts
    attention         where each row's K/V goes and what it sees
    copies            pages to copy before anything of this step is written
    scored            prompt tokens whose probability is asked for
    embedded     [P]  rows whose hidden states are asked for, ascending
    sources      [T]  which samples of the step before the input tokens are; None: all tokens are known
    """

    token_ids: Ints
    sample_rows: Ints
    attention: AttentionMetadata
    copies: tuple[PageCopy, ...] = ()
    scored: ScoredRows | None = None
    embedded: Ints | None = None
    sources: Ints | None = None


def build_batch(step: SchedulerOutput, page_size: int) -> Batch:
    """Flatten a planned step.

    Python's work is per sequence, never per position: page tables are copied as raw memory and
    everything per token is NumPy.
    """
    if all(stop - start == 1 and not drafts for _, start, stop, _, _, drafts in step.work):
        return _build_decodes(step, page_size)
    return _build_mixed(step, page_size)


def _build_decodes(step: SchedulerOutput, page_size: int) -> Batch:
    """The same where every sequence has one row: there is nothing to lay out."""
    work = step.work
    starts = [item.start for item in work]
    kv_len = np.array([item.stop for item in work], np.int32)
    rows = counting(len(work) + 1)

    def in_group(group: int) -> GroupMetadata:
        slots = [
            table.parts[group].pages[start // page_size] * page_size + start % page_size
            for start, table in zip(starts, map(_table, work), strict=True)
        ]
        assert len(set(slots)) == len(slots), f"two rows of a step would write one slot: {slots}"
        tables = _page_tables(work, -(-(max(starts) + 1) // page_size), page_size, group)
        return GroupMetadata(slots=np.array(slots, np.int32), page_table=tables)

    attention = AttentionMetadata(
        positions=np.array(starts, np.int32),
        q_start=rows,
        kv_len=kv_len,
        page_size=page_size,
        groups=tuple(map(in_group, range(_num_groups(work)))),
        quantize_after=_quantize_after(work),
        states=_states(work),
    )
    every = all(samples and not parallel_samples for _, _, _, samples, parallel_samples, _ in work)
    is_ahead = step.sources is not None
    return Batch(
        token_ids=np.zeros(len(work), np.int32) if is_ahead else _token_ids(work),
        sample_rows=counting(len(work)) if every else _sample_rows(work, rows),
        attention=attention,
        copies=step.copies,
        sources=np.array(step.sources, np.int32) if is_ahead else None,
    )


@functools.lru_cache(maxsize=1024)
def counting(count: int) -> Ints:
    """0, 1, ..., count - 1; nobody can write to it."""
    numbers: Ints = np.arange(count, dtype=np.int32)
    numbers.setflags(write=False)
    return numbers


def _table(item: ScheduledChunk) -> PageTable:
    table = item.sequence.table
    assert table is not None, f"{item.sequence.sequence_id} was planned without pages"
    return table


def _build_mixed(step: SchedulerOutput, page_size: int) -> Batch:
    """Of any number of rows each."""
    work = step.work
    starts = np.array([item.start for item in work], np.int32)
    stops = np.array([item.end for item in work], np.int32)
    counts = stops - starts
    q_start = np.zeros(len(work) + 1, np.int32)
    np.cumsum(counts, out=q_start[1:])
    sequence_of_row = np.repeat(np.arange(len(work), dtype=np.int32), counts)
    positions = np.arange(q_start[-1], dtype=np.int32) + (starts - q_start[:-1])[sequence_of_row]
    pages, offsets = np.divmod(positions, np.int32(page_size))

    def in_group(group: int) -> GroupMetadata:
        page_table = _page_tables(work, -(-int(stops.max()) // page_size), page_size, group)
        slots = page_table[sequence_of_row, pages] * page_size + offsets
        assert _all_different(slots), f"two rows of a step would write one slot: {slots.tolist()}"
        return GroupMetadata(slots=slots, page_table=page_table)

    attention = AttentionMetadata(
        positions=positions,
        q_start=q_start,
        kv_len=stops,
        page_size=page_size,
        groups=tuple(map(in_group, range(_num_groups(work)))),
        quantize_after=_quantize_after(work),
        states=_states(work),
    )
    return Batch(
        token_ids=_token_ids(work),
        sample_rows=_sample_rows(work, q_start),
        attention=attention,
        copies=step.copies,
    )


def _num_groups(work: tuple[ScheduledChunk, ...]) -> int:
    table = work[0].sequence.table
    return len(table.parts) if table is not None else 1


def _states(work: tuple[ScheduledChunk, ...]) -> StateMetadata | None:
    """The slots of recurrent states, for models that have some."""
    states = [_table(item).state for item in work]
    if states[0] is None:
        return None
    slots, snapshots = [], []
    for index, state in enumerate(states):
        assert state is not None
        assert state.running is not None, "a sequence was planned without a slot"
        slots.append(state.running)
        snapshots += [(index, planned.position, planned.slot) for planned in state.planned]
        snapshots += [(index, position, slot) for position, slot in state.drafted]
    return StateMetadata(
        slots=np.array(slots, np.int32), snapshots=np.array(snapshots, np.int32).reshape(-1, 3)
    )


def _quantize_after(work: tuple[ScheduledChunk, ...]) -> Ints | None:
    numbers = [item.sequence.table.quantize_after if item.sequence.table is not None else 0 for item in work]
    return np.array(numbers, np.int32) if any(numbers) else None


def _page_tables(work: tuple[ScheduledChunk, ...], width: int, page_size: int, group: int) -> Ints:
    """Row b: the group's pages of ``work[b]`` up to its last position of this step, then zeros."""
    rows = np.zeros((len(work), width), np.int32)
    for row, item in zip(rows, work, strict=True):
        used = -(-item.end // page_size)
        row[:used] = np.frombuffer(_table(item).parts[group].pages, np.int32, used)
    return rows


def _token_ids(work: tuple[ScheduledChunk, ...]) -> Ints:
    token_ids: list[int] = []
    for item in work:
        if item.stop - item.start == 1:
            token_ids.append(item.sequence.tokens[item.start])
        else:
            token_ids += item.sequence.tokens[item.start : item.stop]
        token_ids += item.drafts
    return np.array(token_ids, np.int32)


def _sample_rows(work: tuple[ScheduledChunk, ...], q_start: Ints) -> Ints:
    sample_rows: list[int] = []
    for item, end in zip(work, q_start[1:].tolist(), strict=True):
        if item.samples:
            first = end - 1 - len(item.drafts)
            sample_rows += [first] * (1 + len(item.parallel_samples))
            sample_rows += range(first + 1, end)
    return np.array(sample_rows, np.int32)


def _all_different(slots: Ints) -> bool:
    ordered = np.sort(slots)
    return bool((ordered[1:] != ordered[:-1]).all())
