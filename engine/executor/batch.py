"""Batches: one step as flat arrays, without requests or policy."""

from __future__ import annotations

import functools
import itertools
from array import array
from collections import abc
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.block_manager import KVGroupSpec, PageCopy, PageTable, ResidualWindow
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata, Ints, StateMetadata
from octavo.kernels.residual import residual_starts
from octavo.scheduler import ScheduledChunk, SchedulerOutput, Sequence

NO_ROWS: Ints = np.zeros(0, np.int32)
RowInput = npt.NDArray[np.int32] | npt.NDArray[np.float32]
NO_INPUTS: Mapping[str, RowInput] = MappingProxyType({})
Specs = SequenceOf[KVGroupSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Rows whose logits give the log-probability of the prompt's next token.

    rows     [P]  rows of the step, ascending
    targets  [P]  the token that follows each row
    num_top  [P]  requested number of likeliest tokens
    """

    rows: Ints
    targets: Ints
    num_top: Ints


class OutputSelection(NamedTuple):
    """Requested outputs of a forward.

    rows    [R]  ascending rows whose logits are wanted; None: all rows
    hidden  [P]  ascending rows whose hidden states are wanted; None: no rows
    head         False: instead of logits, the inputs of the output head where it is known
    """

    rows: Ints | None = None
    greedy: bool = False
    hidden: Ints | None = None
    head: bool = True


class Batch(NamedTuple):
    """Tokens of a mixed step.

    token_ids    [T]  input tokens; 0 where ``sources`` gives the token
    sample_rows  [S]  rows whose logits become tokens; repeated for n > 1
    hidden       [P]  ascending rows whose hidden states are requested
    sources      [T]  index of the previous step's sample that is the row's token; None: tokens are known
    """

    token_ids: Ints
    sample_rows: Ints
    attention: AttentionMetadata
    copies: tuple[PageCopy, ...] = ()
    scored: ScoredRows | None = None
    hidden: Ints | None = None
    inputs: Mapping[str, RowInput] = NO_INPUTS
    sources: Ints | None = None

    @property
    def only_samples(self) -> bool:
        return self.scored is None and self.hidden is None

    def slices(self, size: int) -> Iterator[BatchSlice]:
        """Yield slices of at most ``size`` rows, to be computed in order."""
        total = len(self.token_ids)
        for first in range(0, total, size):
            stop = min(first + size, total)
            samples = np.flatnonzero((self.sample_rows >= first) & (self.sample_rows < stop))
            scored, hidden = self.scored, self.hidden
            if scored is not None:
                kept = (scored.rows >= first) & (scored.rows < stop)
                rows, targets, num_top = scored.rows[kept], scored.targets[kept], scored.num_top[kept]
                scored = ScoredRows(rows=rows - np.int32(first), targets=targets, num_top=num_top)
            if hidden is not None:
                hidden = hidden[(hidden >= first) & (hidden < stop)] - np.int32(first)
            part = Batch(
                self.token_ids[first:stop],
                self.sample_rows[samples] - np.int32(first),
                slice_rows(self.attention, first, stop),
                scored=scored,
                hidden=hidden,
                inputs={name: rows[first:stop] for name, rows in self.inputs.items()},
            )
            yield BatchSlice(first, samples.tolist(), part)


class BatchSlice(NamedTuple):
    first: int
    samples: list[int]
    batch: Batch


def build_batch(step: SchedulerOutput, page_size: int, groups: Specs = ()) -> Batch:
    if step.decode_only or all(map(_is_decode, step.work)):
        return _decode_batch(step, page_size, groups)
    return _mixed_batch(step, page_size, groups)


def _is_decode(item: ScheduledChunk) -> bool:
    return item.samples and item.stop - item.start == 1 and not (item.parallel_samples or item.drafts)


def _decode_batch(step: SchedulerOutput, page_size: int, specs: Specs) -> Batch:
    token_ids, positions, lengths, tables = [], [], [], []
    known = step.sources is None
    for item in step.work:
        sequence, start = item[0], item[1]
        table = _table(sequence)
        token_ids.append(sequence.tokens[start] if known else 0)
        positions.append(start)
        lengths.append(start + 1)
        tables.append(table)
    count = len(tables)
    rows = counting(count)
    flat = np.array(positions, np.int32)
    attention = AttentionMetadata(
        positions=flat,
        q_start=counting(count + 1),
        kv_len=np.array(lengths, np.int32),
        page_size=page_size,
        groups=_with_starts(
            tuple(
                [_decode_group(tables, group, positions, page_size) for group in range(len(tables[0].parts))]
            ),
            flat,
            specs,
            page_size,
        ),
        states=_states(tables),
    )
    sources = None if known else np.array(step.sources, np.int32)
    return Batch(np.array(token_ids, np.int32), rows, attention, step.copies, sources=sources)


def _decode_group(tables: list[PageTable], group: int, positions: list[int], page_size: int) -> GroupMetadata:
    width = max(positions) // page_size + 1
    pages, unused = array("i"), array("i", [0]) * width
    slots = []
    for row, position in enumerate(positions):
        held, last = tables[row].parts[group].pages, position // page_size
        pages += held[: last + 1]
        pages += unused[last + 1 :]
        slots.append(held[last] * page_size + position % page_size)
    assert len(set(slots)) == len(slots), f"two rows of a step would write one slot: {slots}"
    return GroupMetadata(np.array(slots, np.int32), np.frombuffer(pages, np.int32).reshape(-1, width))


def _mixed_batch(step: SchedulerOutput, page_size: int, specs: Specs) -> Batch:
    work = step.work
    assert step.sources is None, "only decodes are planned ahead"
    tables = [_table(item.sequence) for item in work]
    num_pages = [-(-item.end // page_size) for item in work]

    def in_group(group: int) -> Ints:
        page_table = np.zeros((len(work), max(num_pages)), np.int32)
        for row, table, used in zip(page_table, tables, num_pages, strict=True):
            row[:used] = np.frombuffer(table.parts[group].pages, np.int32, used)
        return page_table

    attention = AttentionMetadata.of(
        [(item.start, item.end) for item in work],
        *map(in_group, range(len(tables[0].parts))),
        page_size=page_size,
        states=_states(tables),
    )
    for slots, *_ in attention.groups:
        num_different = 1 + int(np.count_nonzero(np.diff(np.sort(slots))))
        assert num_different == len(slots), f"two rows of a step would write one slot: {slots.tolist()}"
    groups = _with_starts(attention.groups, attention.positions, specs, page_size)
    attention = replace(attention, groups=groups)
    return Batch(_token_ids(work), _sample_rows(work, attention.q_start), attention, step.copies)


def _with_starts(
    groups: tuple[GroupMetadata, ...], positions: Ints, specs: Specs, page_size: int
) -> tuple[GroupMetadata, ...]:
    afters = [spec.quantize_after if isinstance(spec, ResidualWindow) else 0 for spec in specs]
    if not any(afters):
        return groups
    return tuple(
        group._replace(starts=_residual_starts(positions, after, spec.window or 1, page_size))
        if after
        else group
        for group, spec, after in zip(groups, specs, afters, strict=True)
    )


def _residual_starts(positions: Ints, after: int, window: int, page_size: int) -> Ints:
    first = residual_starts(positions, window=window, page_size=page_size)
    return np.where(positions < after, 0, first).astype(np.int32)


@functools.lru_cache(maxsize=1024)
def counting(count: int) -> Ints:
    numbers: Ints = np.arange(count, dtype=np.int32)
    numbers.setflags(write=False)
    return numbers


def _table(sequence: Sequence) -> PageTable:
    table = sequence.table
    assert table is not None, f"{sequence.sequence_id} was planned without pages"
    return table


def _states(tables: list[PageTable]) -> StateMetadata | None:
    if tables[0].state is None:
        return None
    slots, snapshots = [], []
    for index, table in enumerate(tables):
        state = table.state
        assert state is not None
        assert state.running is not None, "a sequence was planned without a slot"
        slots.append(state.running)
        snapshots += [(index, planned.position, planned.slot) for planned in state.planned]
        snapshots += [(index, position, slot) for position, slot in state.drafted]
    return StateMetadata(
        slots=np.array(slots, np.int32), snapshots=np.array(snapshots, np.int32).reshape(-1, 3)
    )


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
    if first == 0 and stop == metadata.num_tokens:
        return metadata
    assert metadata.last is None, "rows that see later ones are computed together"
    begin = int(np.searchsorted(metadata.q_start, first, side="right")) - 1
    end = int(np.searchsorted(metadata.q_start, stop, side="left"))
    q_start = np.clip(metadata.q_start[begin : end + 1], first, stop)
    return AttentionMetadata(
        positions=metadata.positions[first:stop],
        q_start=q_start - np.int32(first),
        kv_len=metadata.positions[q_start[1:] - 1] + np.int32(1),
        groups=tuple(
            GroupMetadata(
                group.slots[first:stop],
                group.page_table[begin:end],
                None if group.starts is None else group.starts[first:stop],
            )
            for group in metadata.groups
        ),
        page_size=metadata.page_size,
        states=None if metadata.states is None else _slice_states(metadata, begin, end, q_start),
    )


def _slice_states(metadata: AttentionMetadata, begin: int, end: int, q_start: Ints) -> StateMetadata:
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


def each_once(rows: Ints) -> tuple[Ints, abc.Sequence[int]]:
    if rows is counting(len(rows)) or all(a < b for a, b in itertools.pairwise(rows.tolist())):
        return rows, range(len(rows))
    once, places = np.unique(rows, return_inverse=True)
    return once, places.tolist()
