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
    work = step.work
    firsts = [item[1] for item in work]
    ends = [item[2] + len(item[5]) for item in work]
    starts, stops = np.array(firsts, np.int32), np.array(ends, np.int32)
    num_pages = [-(-end // page_size) for end in ends]
    one_each = sum(ends) - sum(firsts) == len(work)
    if one_each:  # there is nothing to lay out
        q_start, positions = counting(len(work) + 1), starts
    else:
        counts = stops - starts
        q_start = np.zeros(len(work) + 1, np.int32)
        np.cumsum(counts, out=q_start[1:])
        sequence_of_row = np.repeat(counting(len(work)), counts)
        positions = np.arange(q_start[-1], dtype=np.int32) + (starts - q_start[:-1])[sequence_of_row]
        pages, offsets = np.divmod(positions, np.int32(page_size))

    def in_group(group: int) -> GroupMetadata:
        """Row b of its page table: the pages of ``work[b]`` up to its last position of this step, then
        zeros."""
        page_table = np.zeros((len(work), max(num_pages)), np.int32)
        last = []
        for row, item, used in zip(page_table, work, num_pages, strict=True):
            held = _table(item).parts[group].pages
            row[:used] = np.frombuffer(held, np.int32, used)
            last.append(held[used - 1])
        if one_each:
            numbers = [page * page_size + first % page_size for page, first in zip(last, firsts, strict=True)]
            slots, num_different = np.array(numbers, np.int32), len(set(numbers))
        else:
            slots = page_table[sequence_of_row, pages] * page_size + offsets
            num_different = 1 + int(np.count_nonzero(np.diff(np.sort(slots))))
        assert num_different == len(slots), f"two rows of a step would write one slot: {slots.tolist()}"
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
    is_ahead = step.sources is not None
    return Batch(
        token_ids=np.zeros(len(work), np.int32) if is_ahead else _token_ids(work),
        sample_rows=counting(len(work)) if step.plain else _sample_rows(work, q_start),
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


def slice_rows(metadata: AttentionMetadata, first: int, stop: int) -> AttentionMetadata:
    """The step as if it consisted of rows [first, stop) alone, the rows before them done."""
    if first == 0 and stop == metadata.num_tokens:
        return metadata
    begin = int(np.searchsorted(metadata.q_start, first, side="right")) - 1
    end = int(np.searchsorted(metadata.q_start, stop, side="left"))
    q_start = np.clip(metadata.q_start[begin : end + 1], first, stop)
    return AttentionMetadata(
        positions=metadata.positions[first:stop],
        q_start=q_start - np.int32(first),
        kv_len=metadata.positions[q_start[1:] - 1] + np.int32(1),
        groups=tuple(
            GroupMetadata(slots=group.slots[first:stop], page_table=group.page_table[begin:end])
            for group in metadata.groups
        ),
        page_size=metadata.page_size,
        quantize_after=None if metadata.quantize_after is None else metadata.quantize_after[begin:end],
        states=None if metadata.states is None else _slice_states(metadata, begin, end, q_start),
    )


def _slice_states(metadata: AttentionMetadata, begin: int, end: int, q_start: Ints) -> StateMetadata:
    """The states of sequences ``[begin, end)``, and the snapshots among rows ``q_start`` of the step."""
    assert metadata.states is not None
    kept = [
        (sequence - begin, position, slot)
        for sequence, position, slot in metadata.states.snapshots.tolist()
        if begin <= sequence < end
        and metadata.positions[q_start[sequence - begin]]
        < position
        <= metadata.positions[q_start[sequence - begin + 1] - 1] + 1
    ]
    return StateMetadata(
        slots=metadata.states.slots[begin:end], snapshots=np.array(kept, np.int32).reshape(-1, 3)
    )
