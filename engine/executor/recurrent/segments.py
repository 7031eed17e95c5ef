"""Rows of a mixed step, grouped by the sequences whose state they advance."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from octavo.kernels.metadata import AttentionMetadata, Ints
from octavo.kernels.recurrent_kernels import RecurrentKernels
from octavo.kernels.state_segments import NO_STATE, StateSegments


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjacent rows of one sequence. A snapshot inside a chunk splits the chunk.

    position    tokens of the sequence before the segment
    stop        tokens of the sequence including the segment
    copies      slots that get a copy of the state after the segment
    """

    sequence: int
    slot: int
    position: int
    stop: int
    is_last: bool
    copies: tuple[int, ...]

    @property
    def written(self) -> tuple[int, ...]:
        return (self.slot, *self.copies) if self.is_last else self.copies


class SegmentGroup:
    def __init__(self, segments: list[Segment], rows: Ints, *, wave: int, fresh: bool) -> None:
        self.segments = segments
        self.length = segments[0].stop - segments[0].position
        self.wave = wave
        self.fresh = fresh
        self.rows = rows  # [B * S], rows of the step
        first, last = int(rows[0]), int(rows[-1])
        self._run = (first, last + 1) if last + 1 - first == len(rows) and _rises(rows) else None

    def __len__(self) -> int:
        return len(self.segments)

    @functools.cached_property
    def row_ids(self) -> mx.array:
        return mx.array(self.rows)

    @functools.cached_property
    def slot_ids(self) -> mx.array:
        return mx.array(np.array([segment.slot for segment in self.segments], np.int32))

    @functools.cached_property
    def last_rows(self) -> list[int]:
        return [int(row) for row in self.rows[self.length - 1 :: self.length]]

    def take(self, rows: mx.array) -> mx.array:
        """Return the group's rows as [B, S, ..] from all rows [T, ..] of the step."""
        part = rows[self.row_ids] if self._run is None else rows[self._run[0] : self._run[1]]
        return part.reshape(len(self), self.length, *rows.shape[1:])


class StateStep:
    """Segments of one step, in groups. Raises ValueError unless each sequence has one slot."""

    def __init__(self, step: AttentionMetadata) -> None:
        states = step.states
        if states is None or len(states.slots) != step.num_sequences:
            raise ValueError("a step of a model with recurrent layers needs a slot for each sequence")
        self.num_rows = step.num_tokens
        wanted: dict[int, dict[int, list[int]]] = {}
        for sequence, position, slot in states.snapshots.tolist():
            wanted.setdefault(sequence, {}).setdefault(position, []).append(slot)
        keyed: dict[tuple[int, int, bool], tuple[list[Segment], list[Ints]]] = {}
        starts, slots = step.q_start.tolist(), states.slots.tolist()
        for index, slot in enumerate(slots):
            row = starts[index]
            begin = int(step.positions[row])
            end = begin + starts[index + 1] - row
            copies = wanted.get(index, {})
            bounds = [begin, *sorted(p for p in copies if begin < p < end), end]
            for wave, (position, stop) in enumerate(itertools.pairwise(bounds)):
                segment = Segment(index, slot, position, stop, stop == end, tuple(copies.get(stop, ())))
                members, rows = keyed.setdefault((wave, stop - position, position == 0), ([], []))
                members.append(segment)
                rows.append(np.arange(row + position - begin, row + stop - begin, dtype=np.int32))
        self.groups = [
            SegmentGroup(members, np.concatenate(rows), wave=wave, fresh=fresh)
            for (wave, _, fresh), (members, rows) in sorted(keyed.items(), key=lambda item: item[0][0])
        ]
        self._arrays: Any = None
        order = np.concatenate([group.rows for group in self.groups])
        self._inverse = None if _rises(order) else mx.array(np.argsort(order).astype(np.int32))

    def arrays(self, kernels: RecurrentKernels) -> Any:
        if self._arrays is None:
            self._arrays = kernels.arrays(self.segments())
        return self._arrays

    def segments(self) -> StateSegments:
        rows: dict[int, tuple[int, int, int, int]] = {}
        checkpoints: list[tuple[int, int]] = []
        for group in self.groups:
            for segment, last in zip(group.segments, group.last_rows, strict=True):
                checkpoints += [(last, slot) for slot in segment.copies]
                first, count, source, _ = rows.get(
                    segment.sequence,
                    (last + 1 - group.length, 0, NO_STATE if group.fresh else segment.slot, segment.slot),
                )
                rows[segment.sequence] = (first, count + group.length, source, segment.slot)
        return StateSegments(
            num_rows=self.num_rows,
            segments=np.array([rows[sequence] for sequence in sorted(rows)], np.int32).reshape(-1, 4),
            checkpoints=np.array(checkpoints, np.int32).reshape(-1, 2),
        )

    def join(self, parts: list[mx.array]) -> mx.array:
        """Return the rows of a step [T, ..] from the results of its groups, [B, S, ..] each."""
        flat = [part.reshape(-1, *part.shape[2:]) for part in parts]
        rows = flat[0] if len(flat) == 1 else mx.concatenate(flat)
        return rows if self._inverse is None else rows[self._inverse]


def _rises(rows: Ints) -> bool:
    return bool((rows[1:] > rows[:-1]).all())
