from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels.state_segments import NO_STATE, StateSegments


def test_segments_lie_one_after_the_other() -> None:
    step = StateSegments.of([2, 1, 0], source=[5, NO_STATE, 0], target=[5, 3, 0], checkpoints=[(1, 4)])
    assert step.num_rows == 3
    assert step.segments.tolist() == [[0, 2, 5, 5], [2, 1, NO_STATE, 3], [3, 0, 0, 0]]
    assert step.checkpoints.tolist() == [[1, 4]]
    assert step.segments.dtype == step.checkpoints.dtype == np.int32
    assert step.segments.flags.c_contiguous
    step.check(6)
    empty = StateSegments.of([], source=[])
    assert empty.segments.shape == (0, 4)
    empty.check(1)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (StateSegments.of([1], source=[6]), r"read must lie in \[-1, 6\), got \[6\]"),
        (StateSegments.of([1], source=[NO_STATE]), r"written must lie in \[0, 6\), got \[-1\]"),
        (StateSegments.of([1], source=[0], checkpoints=[(0, 6)]), r"written must lie in \[0, 6\)"),
        (
            StateSegments.of([1], source=[0], checkpoints=[(1, 2)]),
            "checkpoints must lie in the step's 1 rows",
        ),
        (StateSegments.of([1, 1], source=[2, 2]), r"written once per step, got \[2, 2\]"),
        (StateSegments.of([1], source=[2], checkpoints=[(0, 2)]), r"written once per step, got \[2, 2\]"),
        (StateSegments.of([1, 1], source=[2, 2], target=[2, 3]), "must not be read by another"),
        (
            StateSegments(
                num_rows=3,
                segments=np.array([[0, 2, 0, 0], [1, 2, 1, 1]], np.int32),
                checkpoints=np.zeros((0, 2), np.int32),
            ),
            "must not share rows",
        ),
        (
            StateSegments(
                num_rows=1,
                segments=np.array([[0, 2, 0, 0]], np.int32),
                checkpoints=np.zeros((0, 2), np.int32),
            ),
            "must lie in the step's 1 rows",
        ),
    ],
)
def test_steps_that_contradict_themselves_are_refused(step: StateSegments, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        step.check(6)


def test_two_segments_may_read_a_slot_that_is_not_written() -> None:
    StateSegments.of([1, 1], source=[2, 2], target=[3, 4]).check(5)
