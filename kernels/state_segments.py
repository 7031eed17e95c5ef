"""Metadata of one step of recurrent layers, as flat arrays. Imports NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .metadata import Ints

NO_STATE = -1
"""Stands for the slot of a sequence that has no state yet. The model defines its initial state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSegments:
    """The T rows of a step, divided into B segments: consecutive rows of one sequence, in order.

    segments     [B, 4]  (first row, number of rows, slot to read, slot to write) of each segment. The slot to
                 read is ``NO_STATE`` for a sequence without a state
    checkpoints  [C, 2]  (row, slot): the slot gets a copy of the state after this row; row -1 does nothing

    **A step that is computed twice advances a state twice**, unless its segments read other slots than they
    write. Code that may compute a step again therefore writes to spare slots.
    """

    num_rows: int
    segments: Ints
    checkpoints: Ints

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        source: Sequence[int],
        target: Sequence[int] | None = None,
        checkpoints: Sequence[tuple[int, int]] = (),
    ) -> StateSegments:
        """Return consecutive segments of these lengths; ``target`` defaults to ``source``."""
        starts = np.cumsum([0, *lengths])
        columns = (starts[:-1], lengths, source, source if target is None else target)
        return cls(
            num_rows=int(starts[-1]),
            segments=np.array(columns, np.int32).reshape(4, -1).T.copy(),
            checkpoints=np.array(checkpoints, np.int32).reshape(-1, 2),
        )

    def check(self, num_slots: int) -> None:
        """Raise ValueError for rows or slots out of range, shared rows, or conflicting slots."""
        used = self.segments[self.segments[:, 1] > 0]
        start, length, source, target = used.T
        if (length < 0).any() or (start < 0).any() or (start + length > self.num_rows).any():
            raise ValueError(
                f"segments must lie in the step's {self.num_rows} rows, got {used[:, :2].tolist()}"
            )
        order = np.argsort(start)
        if (start[order][1:] < (start + length)[order][:-1]).any():
            raise ValueError(f"segments must not share rows, got {used[:, :2].tolist()}")
        kept = self.checkpoints[self.checkpoints[:, 0] >= 0]
        rows, slots = kept.T
        if (rows >= self.num_rows).any():
            raise ValueError(f"checkpoints must lie in the step's {self.num_rows} rows, got {rows.tolist()}")
        written = np.concatenate([target, slots])
        for name, values, lowest in (("read", source, NO_STATE), ("written", written, 0)):
            if ((values < lowest) | (values >= num_slots)).any():
                raise ValueError(f"slots {name} must lie in [{lowest}, {num_slots}), got {values.tolist()}")
        if len(np.unique(written)) < len(written):
            raise ValueError(f"a slot must be written once per step, got {written.tolist()}")
        others = np.where(source == target, NO_STATE, source)
        if np.isin(others[others >= 0], written).any():
            raise ValueError(
                f"a slot that one segment writes must not be read by another: read {source.tolist()}, "
                f"written {written.tolist()}"
            )
