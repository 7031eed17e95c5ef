"""Slots of states in programs of steps: what changes from step to step is in arrays of numbers.

Kernels alone advance states there, in place, so that a program knows where they lie; and which rows go on
which slot, and who has none yet, are values and no part of the program.
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
    """``ReplayablePool`` of a pool whose states kernels compute, all of them. Its arrays stay where they
    are from now on."""

    def __init__(self, pool: StatePool, capture: StateCapture) -> None:
        self._pool, self._capture = pool, capture
        self._of: StateStep | None = None  # the step whose values these are
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
        """The flags, first, so that a program marks what a kernel gave before it goes on; then the states."""
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
    """None, or as many as there are sequences, if that suffices: programs are told apart by numbers of
    checkpoints, and those that a page's end brings must not make one of each."""
    num_missing = num_sequences - len(checkpoints)
    if not len(checkpoints) or num_missing <= 0:
        return checkpoints
    return np.concatenate([checkpoints, np.array([NO_CHECKPOINT] * num_missing, np.int32)])


_: type[ReplayablePool] = StateReplay
