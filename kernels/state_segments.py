"""Segments of one step of recurrent layers, as flat arrays that assign rows to states.

Like ``metadata.py``: built once per step on the host, used by every layer, NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .metadata import Ints

NO_STATE = -1
"""Slot to read for a sequence without a state. Its initial state is up to the model; it need not be zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSegments:
    """T rows of B segments; the rows of a segment are adjacent, in order and of one sequence.

    num_rows     T
    segments     [B, 4]  first row, number of rows, slot that is read (``NO_STATE``: none), slot that is
                         written. A segment without rows does nothing, so that steps can be padded.
    checkpoints  [C, 2]  row, and the slot that gets a copy of the state after it; row -1: nothing

    **A step that is computed twice advances a state twice**, unless its segments read other slots than they
    write, because kernels have no other record of steps. Code that may compute a step again (a probe, a
    retry) writes to spare slots and swaps the slot numbers after the step.
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
        """Raise ValueError for rows or slots out of range, or if two segments touch a written slot."""
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
            raise ValueError(f"a slot must be written once in a step, got {written.tolist()}")
        others = np.where(source == target, NO_STATE, source)
        if np.isin(others[others >= 0], written).any():
            raise ValueError(
                f"a slot that one segment writes must not be read by another: read {source.tolist()}, "
                f"written {written.tolist()}"
            )
