"""State slots in captured programs of steps: per-step data is passed in arrays.

Only kernels advance states there, in place, so a program can keep the arrays' addresses. The slot of each
row, and whether it has a state yet, are values and not part of the program.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from octavo.kernels.metadata import Ints
from octavo.kernels.recurrent_kernels import StateCapture
from octavo.kernels.replay import Programs, ReplayablePool

from .segments import StateStep
from .state_pool import StatePool

NO_CHECKPOINT = (-1, 0)


class StateReplay:
    """``ReplayablePool`` of a pool in which kernels compute all states; its arrays keep their addresses."""

    def __init__(self, pool: StatePool, capture: StateCapture) -> None:
        self._pool, self._capture = pool, capture
        self._of: StateStep | None = None  # the step of the current values
        self._values: list[Ints] = []
        pool.stays = True

    def step_values(self) -> list[Ints]:
        """Segments [B, 4], checkpoints [C, 2] and flags [T]."""
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
        arrays = self._pool.arrays()
        return [*map(mx.array, self.step_values()), *(arrays[name] for name in sorted(arrays))]

    def bind_inputs(self, arrays: Sequence[mx.array]) -> None:
        segments, checkpoints, flags, *states = arrays
        named = dict(zip(sorted(self._pool.arrays()), states, strict=True))
        self._pool.bind(self._capture.bind([segments, checkpoints]), flags, named)

    def pending(self) -> list[mx.array]:
        """Return the flags first, so that a program checks the kernels' results early, then the states."""
        flags, advanced = self._pool.advanced()
        missing = sorted(set(self._pool.arrays()) - set(advanced))
        if missing or flags is None:
            raise ValueError(f"the states {missing} are not advanced by a kernel")
        return [flags, *(advanced[name] for name in sorted(advanced))]

    def bind_pending(self, arrays: Sequence[mx.array]) -> None:
        flags, *states = arrays
        self._pool.set_advanced(flags, dict(zip(sorted(self._pool.arrays()), states, strict=True)))

    def programs(self) -> Programs:
        return self._capture.programs


def _filled_up(checkpoints: Ints, num_sequences: int) -> Ints:
    """Return checkpoints padded to one per sequence, or unchanged if there are none or more. Programs are
    specialized by the number of checkpoints; without padding, page ends would create many."""
    num_missing = num_sequences - len(checkpoints)
    if not len(checkpoints) or num_missing <= 0:
        return checkpoints
    return np.concatenate([checkpoints, np.array([NO_CHECKPOINT] * num_missing, np.int32)])


_: type[ReplayablePool] = StateReplay
