"""Metadata of one attention step as flat arrays. Imports only NumPy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class GroupMetadata(NamedTuple):
    """The pages that a step writes and reads in one group of layers.

    slots       [T]     slot for each row's K/V: ``page * page_size + offset``
    page_table  [B, P]  pages of sequence b; entries past its last page are 0 and never read
    starts      [T]     for residual pages: first position that each row reads from them (None: window start)
    """

    slots: Ints
    page_table: Ints
    starts: Ints | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMetadata:
    """Slots of a step's recurrent states.

    slots      [B]     slot of each sequence; it holds old data if the sequence's first row is at position 0
    snapshots  [C, 3]  (index of the sequence in the step, number of tokens, slot): the slot gets a copy of
                       the state after this number of tokens
    """

    slots: Ints
    snapshots: Ints = field(default_factory=lambda: np.zeros((0, 3), np.int32))


@dataclass(slots=True, kw_only=True)
class AttentionMetadata:
    """T tokens of B sequences, and their pages. The rows of a sequence are adjacent and in order.

    Treat an object as immutable; the dataclass is not frozen, because freezing triples the time to build it.

    positions       [T]      position of each token in its sequence
    q_start         [B + 1]  rows of sequence b are ``q_start[b]:q_start[b + 1]``
    kv_len          [B]      positions of sequence b that have K/V after this step
    groups                   pages in each pool: one pool per group of layers, then the residual pages of each
    states                   slots of recurrent layers; None for models without any
    last            [T]      last position that each row sees (None: its own)
    """

    positions: Ints
    q_start: Ints
    kv_len: Ints
    page_size: int
    groups: tuple[GroupMetadata, ...]
    states: StateMetadata | None = None
    last: Ints | None = None

    @property
    def seen_until(self) -> Ints:
        """Last position that each row sees, [T]."""
        return self.positions if self.last is None else self.last

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def num_sequences(self) -> int:
        return len(self.kv_len)

    @property
    def row_sequences(self) -> Ints:
        """Index of each row's sequence, [T]."""
        counts = np.diff(self.q_start)
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    @classmethod
    def of(
        cls,
        spans: Sequence[tuple[int, int]],
        *tables: Ints,
        page_size: int,
        states: StateMetadata | None = None,
    ) -> AttentionMetadata:
        """Return the step that computes positions [start, stop) of each sequence.

        tables   for each group, the sequences' pages [B, P]
        """
        firsts, stops = np.array(spans, np.int32).T
        q_start = np.zeros(len(spans) + 1, np.int32)
        np.cumsum(stops - firsts, out=q_start[1:])
        owners = np.repeat(np.arange(len(spans)), stops - firsts)
        positions = np.arange(q_start[-1], dtype=np.int32) + (firsts - q_start[:-1])[owners]
        pages, offsets = np.divmod(positions, np.int32(page_size))
        return cls(
            positions=positions,
            q_start=q_start,
            kv_len=np.ascontiguousarray(stops),
            page_size=page_size,
            groups=tuple(
                GroupMetadata(
                    slots=(table[owners, pages] * page_size + offsets).astype(np.int32),
                    page_table=np.ascontiguousarray(table, np.int32),
                )
                for table in tables
            ),
            states=states,
        )

    def select(self, groups: Iterable[int]) -> AttentionMetadata:
        return replace(self, groups=tuple(self.groups[index] for index in groups))

    def only_group(self) -> GroupMetadata:
        """Return the step's only group. Raises ValueError if the step has several."""
        if len(self.groups) != 1:
            raise ValueError(f"a pool of one group needs metadata of one group, got {len(self.groups)}")
        return self.groups[0]

    def check(self, num_pages: int) -> None:
        """Raise ValueError unless the step has one group and every index lies inside ``num_pages`` pages.

        MLX and the kernels do not check bounds, and a wrong index could crash them.
        """
        group, tokens, sequences = self.only_group(), len(self.positions), len(self.kv_len)
        for name, array, shape in (
            *([] if group.starts is None else [("starts", group.starts, (tokens,))]),
            ("positions", self.positions, (tokens,)),
            ("last", self.seen_until, (tokens,)),
            ("slots", group.slots, (tokens,)),
            ("q_start", self.q_start, (sequences + 1,)),
            ("kv_len", self.kv_len, (sequences,)),
            ("page_table", group.page_table, (sequences, group.page_table.shape[-1])),
        ):
            if array.dtype != np.int32 or array.shape != shape:
                raise ValueError(f"{name} must be int32 {shape}, got {array.dtype} {array.shape}")
        if not tokens:
            raise ValueError("a step must have at least one token; do not launch empty steps")
        for name, array, limit in (
            ("slots", group.slots, num_pages * self.page_size),
            ("page_table", group.page_table, num_pages),
            ("kv_len", self.kv_len, group.page_table.shape[1] * self.page_size + 1),
            *([] if group.starts is None else [("starts", group.starts, int(self.kv_len.max()) + 1)]),
        ):
            low, high = int(array.min()), int(array.max())
            if low < 0 or high >= limit:
                raise ValueError(f"{name} must lie in [0, {limit}), got values from {low} to {high}")
        firsts, behind = self.q_start[:-1], self.q_start[1:]
        if self.q_start[0] != 0 or self.q_start[-1] != tokens or (behind <= firsts).any():
            raise ValueError(f"q_start must rise from 0 to {tokens}, got {self.q_start.tolist()}")
        ends = np.repeat(self.kv_len, np.diff(self.q_start))
        if ((self.positions < 0) | (self.positions >= ends)).any():
            row = int(np.argmax((self.positions < 0) | (self.positions >= ends)))
            raise ValueError(
                f"positions must lie inside their sequence: row {row} is at position {self.positions[row]}, "
                f"its sequence ends before {ends[row]}"
            )
        if ((self.seen_until < self.positions) | (self.seen_until >= ends)).any():
            raise ValueError(f"last must lie from a row's position to its sequence's end, got {self.last}")
