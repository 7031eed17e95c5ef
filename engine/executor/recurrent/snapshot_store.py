"""Snapshots of states that take fewer bytes than the states: what runs is never kept so.

full   as the model keeps it; a snapshot is a slot like any other, and there is no store
bf16   float32 arrays rounded to bf16: half
int8   float32 arrays as integers of [-127, 127] times one float32 for each row (the last axis): a quarter

Arrays that the model keeps in 16 bits, such as the inputs of convolutions, stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from octavo.kernels.page_bytes import PageBytes

from ...api.config import StateSnapshots
from .entries import EntrySpec, slot_bytes


def stored_as(entry: EntrySpec, form: StateSnapshots) -> tuple[EntrySpec, ...]:
    """The arrays that one array of a state becomes."""
    if form == "full" or entry.dtype != mx.float32 or not entry.shape:
        return (entry,)
    if form == "bf16":
        return (EntrySpec(entry.shape, mx.bfloat16),)
    return EntrySpec(entry.shape, mx.int8), EntrySpec(entry.shape[:-1], mx.float32)


def snapshot_bytes(entries: Mapping[str, EntrySpec], form: StateSnapshots) -> int:
    """Bytes of a snapshot of these arrays."""
    return sum(part.nbytes for entry in entries.values() for part in stored_as(entry, form))


def compress(x: mx.array, form: StateSnapshots) -> tuple[mx.array, ...]:
    """Rows [n, ...] of one array as they are stored."""
    if form == "full" or x.dtype != mx.float32 or x.ndim < 2:
        return (x,)
    if form == "bf16":
        return (x.astype(mx.bfloat16),)
    scale = mx.abs(x).max(axis=-1) / 127
    return mx.round(x / mx.where(scale == 0, 1, scale)[..., None]).astype(mx.int8), scale


def restore(parts: Sequence[mx.array], entry: EntrySpec) -> mx.array:
    """Rows [n, ...] as the model goes on from them."""
    if len(parts) == 2:
        return parts[0].astype(mx.float32) * parts[1][..., None]
    return parts[0].astype(entry.dtype)


class SnapshotStore:
    """``num_slots`` compressed snapshots of ``entries``, by name, and after how many tokens each stands."""

    def __init__(self, num_slots: int, entries: Mapping[str, EntrySpec], form: StateSnapshots) -> None:
        self.form = form
        self._entries = dict(sorted(entries.items()))
        self._arrays = {
            name: [mx.zeros((num_slots, *part.shape), part.dtype) for part in stored_as(entry, form)]
            for name, entry in self._entries.items()
        }
        mx.eval(self._arrays)
        self._positions = np.zeros(num_slots, np.int64)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for arrays in self._arrays.values() for array in arrays)

    @property
    def described(self) -> dict[str, EntrySpec]:
        """Every stored array, by a name that says what it is."""
        parts = {name: stored_as(entry, self.form) for name, entry in self._entries.items()}
        return {
            name if part == self._entries[name] else f"{name} as {self.form} {index}": part
            for name, stored in parts.items()
            for index, part in enumerate(stored)
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of one snapshot."""
        return slot_bytes(self.described)

    def positions(self, slots: Sequence[int]) -> list[int]:
        return [int(self._positions[slot]) for slot in slots]

    def put(self, slots: Sequence[int], states: Mapping[str, mx.array], positions: Sequence[int]) -> None:
        """Compress states [n, ...] into these slots."""
        for name in self._entries:
            self._write(name, slots, compress(states[name], self.form))
        mx.eval(self._arrays)
        self._positions[list(slots)] = positions

    def get(self, slots: Sequence[int]) -> dict[str, mx.array]:
        """States [n, ...] to go on from."""
        ids = mx.array(np.array(slots, np.int32))
        return {
            name: restore([array[ids] for array in self._arrays[name]], entry)
            for name, entry in self._entries.items()
        }

    def read(self, slots: Sequence[int]) -> PageBytes:
        """Bytes [n, ``num_bytes``], in the order of ``described``."""
        if not len(slots):
            return np.empty((0, self.num_bytes), np.uint8)
        ids = mx.array(np.array(slots, np.int32))
        arrays = [array[ids] for arrays in self._arrays.values() for array in arrays]
        return np.concatenate([np.array(x.reshape(len(slots), -1).view(mx.uint8)) for x in arrays], axis=1)

    def write(self, slots: Sequence[int], data: PageBytes, positions: Sequence[int]) -> None:
        """Put bytes as from ``read`` into these slots."""
        first = 0
        for name, entry in self._entries.items():
            parts = []
            for part in stored_as(entry, self.form):
                raw = np.ascontiguousarray(data[:, first : first + part.nbytes])
                parts.append(mx.array(raw).view(part.dtype).reshape(len(slots), *part.shape))
                first += part.nbytes
            self._write(name, slots, parts)
        mx.eval(self._arrays)
        self._positions[list(slots)] = positions

    def _write(self, name: str, slots: Sequence[int], parts: Sequence[mx.array]) -> None:
        ids = mx.array(np.array(slots, np.int32))
        mx.eval(parts)
        for index, part in enumerate(parts):
            array = self._arrays[name].pop(index)  # nothing else may hold it, or all of it is copied
            array[ids] = part
            self._arrays[name].insert(index, array)
