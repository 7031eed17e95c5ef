"""Slots for the recurrent states of sequences. A slot is a page of one more group.

New states are written by ``commit``. The pool records the number of tokens in each slot and refuses a step
that begins at another position. So a repeated step cannot advance a state twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np

from octavo.kernels.metadata import Ints
from octavo.kernels.page_bytes import PageBytes
from octavo.kernels.recurrent_kernels import RecurrentKernels
from octavo.kernels.replay import ReplayablePool

from .entries import EntrySpec, bytes_of, fitting, slot_bytes
from .mixers import MixerError
from .recurrences import Advance
from .segments import SegmentGroup, StateStep

NOTHING = -1  # position of an empty slot


class StatePool:
    def __init__(
        self,
        num_slots: int,
        entries: Mapping[str, EntrySpec] | None = None,
        *,
        zeros: Callable[[tuple[int, ...], mx.Dtype], mx.array] = mx.zeros,
    ) -> None:
        self.num_slots = num_slots
        self._fixed = entries is not None
        self.computed_by: dict[str, bool] = {}
        self._arrays = {
            name: zeros((num_slots, *entry.shape), entry.dtype) for name, entry in (entries or {}).items()
        }
        mx.eval(list(self._arrays.values()))
        self._positions = np.full(num_slots, NOTHING, np.int64)
        self._step: StateStep | None = None
        self._written: dict[str, list[tuple[SegmentGroup, mx.array]]] = {}
        self._sums: list[tuple[SegmentGroup, mx.array]] = []
        self._failed: list[int] = []
        self._advanced: dict[str, mx.array] = {}
        self._flags: mx.array | None = None
        self._bound: Any = None
        self.stays = False

    @property
    def entries(self) -> dict[str, EntrySpec]:
        return {name: EntrySpec(array.shape[1:], array.dtype) for name, array in self._arrays.items()}

    @property
    def layout(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        entries = sorted(self.entries.items())
        return tuple((name, one.shape, str(one.dtype).removeprefix("mlx.core.")) for name, one in entries)

    @property
    def snapshot_bytes(self) -> int:
        return slot_bytes(self.entries) + 8

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    @property
    def step(self) -> StateStep:
        assert self._step is not None, "a state is used outside a step"
        return self._step

    def begin_step(self, step: StateStep) -> None:
        """Begin a step. Raises ValueError if a slot is not at its sequence's position."""
        targets: list[int] = []
        for group in step.groups:
            for segment in group.segments:
                targets += segment.written
                if group.wave or group.fresh:
                    continue
                if not 0 <= segment.slot < self.num_slots:
                    raise ValueError(f"slots must lie in [0, {self.num_slots}), got {segment.slot}")
                stands = int(self._positions[segment.slot])
                if stands != segment.position:
                    raise ValueError(
                        f"slot {segment.slot} holds the state after {stands} tokens, but its sequence "
                        f"continues after {segment.position}; restore the slots before you compute a step "
                        "again"
                    )
        if len(set(targets)) != len(targets) or not all(0 <= slot < self.num_slots for slot in targets):
            raise ValueError(f"slots of a step must be different, in [0, {self.num_slots}), got {targets}")
        self._step = step
        self._written = {}
        self._advanced = {}
        self._flags = self._bound = None

    def read(self, name: str, group: SegmentGroup) -> mx.array | None:
        """Return the states [B, ..] before the group's segments; None if there are none."""
        if group.wave == 0:
            array = None if group.fresh else self._arrays.get(name)
            return None if array is None else array[group.slot_ids]
        before = {
            segment.sequence: value[i : i + 1]
            for other, value in self._written.get(name, ())
            if other.wave == group.wave - 1
            for i, segment in enumerate(other.segments)
        }
        rows = [before[segment.sequence] for segment in group.segments if segment.sequence in before]
        return mx.concatenate(rows) if len(rows) == len(group) else None

    def write(self, name: str, group: SegmentGroup, value: mx.array) -> None:
        """Hold the states [B, ..] after the group's segments until ``commit`` stores them."""
        if self.stays:
            raise MixerError(
                f"MLX operations write state {name!r}, which a kernel wrote during the load-time probe"
            )
        entry = self._arrays.get(name)
        if entry is None and self._fixed:
            raise MixerError(
                f"the model writes state {name!r}, which it did not write during the load-time probe"
            )
        if entry is not None:
            value = fitting(value, entry.shape[1:])
            if self._fixed:
                value = value.astype(entry.dtype)
        self._written.setdefault(name, []).append((group, value))

    def advance(self, name: str, advance: Advance, kernels: RecurrentKernels) -> mx.array:
        entry, array = advance.entry, self._arrays.get(name)
        if array is None:
            if self._fixed:
                raise MixerError(
                    f"a kernel writes state {name!r}, which no kernel wrote during the load-time probe"
                )
            array = self._arrays[name] = mx.zeros((self.num_slots, *entry.shape), entry.dtype)
            self.computed_by[name] = True
        if (array.shape[1:], array.dtype) != (entry.shape, entry.dtype) or name in self._advanced:
            raise MixerError(f"a kernel's state {name!r} has changed since the model was probed")
        arrays = self.step.arrays(kernels) if self._bound is None else self._bound
        self._advanced[name], y = advance.run(array, arrays)
        if self._flags is None:
            self._flags = mx.array(np.zeros(self.step.num_rows, np.int32))
        self._flags = kernels.mark_nonfinite(self._flags, arrays, y)
        return advance.finish(y)

    def pending(self) -> list[mx.array]:
        written = [part for parts in self._written.values() for part in parts]
        self._sums = [
            (group, value.reshape(len(group), -1).astype(mx.float32).sum(axis=1))
            for group, value in written
            if mx.issubdtype(value.dtype, mx.floating)
        ]
        states = [value for _, value in written]
        flags = [] if self._flags is None else [self._flags]
        return [*flags, *states, *self._advanced.values(), *(total for _, total in self._sums)]

    def commit(self) -> None:
        step, self._step = self.step, None
        written, self._written = self._written, {}
        self._failed = []
        for group, total in self._sums:
            finite = np.isfinite(np.array(total))
            self._failed += [row for row, ok in zip(group.last_rows, finite, strict=True) if not ok]
        self._sums = []
        if self._flags is not None:
            flags = cast("list[int]", self._flags.tolist())
            self._failed += [row for row, flag in enumerate(flags) if flag]
            self._flags = None
        self._arrays |= self._advanced
        self._advanced = {}
        for name, parts in written.items():
            self._store(name, parts)
        mx.eval(list(self._arrays.values()))
        for group in step.groups:
            for segment in group.segments:
                self._positions[list(segment.written)] = segment.stop

    def _rows(self, slots: Sequence[int]) -> dict[str, mx.array]:
        ids = mx.array(np.array(slots, np.int32))
        rows = {name: array[ids] for name, array in self._arrays.items()}
        mx.eval(rows)  # drops the last reference to the pool
        return rows

    def nonfinite_rows(self) -> list[int]:
        return sorted(set(self._failed))

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slot ``source`` onto slot ``target`` for all pairs. Call it between steps."""
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            self._put(targets, self._rows(sources), self._positions[list(sources)].tolist())

    def _put(self, slots: Sequence[int], rows: Mapping[str, mx.array], positions: Sequence[int]) -> None:
        mx.eval(rows)
        if self.stays:
            for name, array in self._arrays.items():
                bytes_of(array)[list(slots)] = bytes_of(rows[name])
            self._positions[list(slots)] = positions
            return
        targets = mx.array(np.array(slots, np.int32))
        for name in list(self._arrays):
            array = self._arrays.pop(name)  # another reference would force a copy of the whole array
            array[targets] = rows[name]
            self._arrays[name] = array
        mx.eval(list(self._arrays.values()))
        self._positions[list(slots)] = positions

    def read_pages(self, slots: Sequence[int]) -> PageBytes:
        """Return copies of whole slots, uint8 [n, ``snapshot_bytes``]. Call it between steps.

        A row holds the bytes of every entry by name, then the number of tokens, int64.
        """
        if not len(slots):
            return np.empty((0, self.snapshot_bytes), np.uint8)
        parts = [bytes_of(rows) for _, rows in sorted(self._rows(slots).items())]
        positions = self._positions[list(slots)].astype("<i8")
        return np.concatenate([*parts, positions[:, None].view(np.uint8)], axis=1)

    def write_pages(self, slots: Sequence[int], data: PageBytes) -> None:
        """Write bytes from ``read_pages`` into these slots. Call it between steps."""
        positions = np.ascontiguousarray(data[:, -8:]).view("<i8")[:, 0].tolist()
        rows: dict[str, mx.array] = {}
        first = 0
        for name, entry in sorted(self.entries.items()):
            part = np.ascontiguousarray(data[:, first : first + entry.nbytes])
            rows[name] = mx.array(part).view(entry.dtype).reshape(len(slots), *entry.shape)
            first += entry.nbytes
        self._put(slots, rows, positions)

    def _store(self, name: str, parts: list[tuple[SegmentGroup, mx.array]]) -> None:
        places: list[int] = []
        slots: list[int] = []
        first = 0
        for group, _ in parts:
            for i, segment in enumerate(group.segments):
                slots += segment.written
                places += [first + i] * len(segment.written)
            first += len(group)
        if not self._fixed:
            self._widen(name, parts)
        shape = self._arrays[name].shape[1:]
        values = [fitting(value, shape) for _, value in parts]
        rows = values[0] if len(values) == 1 else mx.concatenate(values)
        if places != list(range(first)):
            rows = rows[mx.array(np.array(places, np.int32))]
        array = self._arrays.pop(name)  # another reference would force a copy of the whole array
        array[mx.array(np.array(slots, np.int32))] = rows.astype(array.dtype)
        self._arrays[name] = array

    def _widen(self, name: str, parts: list[tuple[SegmentGroup, mx.array]]) -> None:
        for _, value in parts:
            array = self._arrays.get(name)
            if array is None:
                array = mx.zeros((self.num_slots, *value.shape[1:]), value.dtype)
                self.computed_by[name] = False
            shape = tuple(map(max, array.shape[1:], value.shape[1:]))
            self._arrays[name] = fitting(array, shape).astype(mx.result_type(array, value))


NO_CHECKPOINT = (-1, 0)


class StateReplay:
    """``ReplayablePool`` of a state pool, whose ``pending`` serves steps that are not captured."""

    def __init__(self, pool: StatePool, bind: Callable[[mx.array, mx.array], Any]) -> None:
        self._pool, self._bind = pool, bind
        self._of: StateStep | None = None
        self._values: list[Ints] = []
        pool.stays = True

    def step_values(self) -> list[Ints]:
        step = self._pool.step
        if step is not self._of:
            segments = step.segments()
            checkpoints = _filled_up(segments.checkpoints, len(segments.segments))
            flags = np.zeros(step.num_rows, np.int32)
            self._of, self._values = step, [segments.segments, checkpoints, flags]
        return self._values

    @property
    def step_shape(self) -> tuple[int, ...]:
        segments, checkpoints, flags = self.step_values()
        return len(segments), len(checkpoints), len(flags)

    def packed_values(self) -> list[Ints]:
        return self.step_values()

    def step_inputs(self) -> list[mx.array]:
        arrays = sorted(self._pool._arrays.items())
        return [*map(mx.array, self.step_values()), *(array for _, array in arrays)]

    def bind_inputs(self, arrays: Sequence[mx.array]) -> None:
        segments, checkpoints, self._pool._flags, *states = arrays
        self._pool._bound = self._bind(segments, checkpoints)
        self._pool._arrays = dict(zip(sorted(self._pool._arrays), states, strict=True))
        self._pool._advanced = {}

    def pending(self) -> list[mx.array]:
        flags, advanced = self._pool._flags, self._pool._advanced
        missing = sorted(set(self._pool._arrays) - set(advanced))
        if missing or flags is None:
            raise ValueError(f"the states {missing} are not advanced by a kernel")
        return [flags, *(advanced[name] for name in sorted(advanced))]

    def bind_pending(self, arrays: Sequence[mx.array]) -> None:
        self._pool._flags, *states = arrays
        self._pool._advanced = dict(zip(sorted(self._pool._arrays), states, strict=True))


def _filled_up(checkpoints: Ints, num_sequences: int) -> Ints:
    num_missing = num_sequences - len(checkpoints)
    if not len(checkpoints) or num_missing <= 0:
        return checkpoints
    return np.concatenate([checkpoints, np.array([NO_CHECKPOINT] * num_missing, np.int32)])


_: type[ReplayablePool] = StateReplay
