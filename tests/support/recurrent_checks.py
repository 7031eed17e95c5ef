from __future__ import annotations

import mlx.core as mx
import numpy as np

from octavo.kernels.state_segments import NO_STATE, StateSegments
from recurrent_cases import LENGTH, NUM_SLOTS, SLOT, Case, all_cases, bits, call, floats, run

CUTS = ([1] * LENGTH, [3, 9, 1, 1, 13, 13], [LENGTH - 1, 1], [33, 7])
# One rounding of the result, relative to the largest; float32 sums add little.
ROUNDING = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11, mx.float32: 0.0}


def check_truth(case: Case) -> None:
    """Compare y and the states of two sequences with float64."""
    half = case.length // 2
    step = StateSegments.of([half, case.length - half], source=[NO_STATE, NO_STATE], target=[SLOT, 4])
    pool, y = call(case, case.pool(), step, case.rows)
    states = np.zeros((NUM_SLOTS, *case.state))
    exact = case.truth(states, step, *(floats(x) for x in case.rows))
    for what, got, truth in (("y", y, exact), ("the states", pool[mx.array([SLOT, 4])], states[[SLOT, 4]])):
        error = np.abs(floats(got) - truth).max() / np.abs(truth).max()
        assert error <= ROUNDING[got.dtype] + 3e-6, f"{case.name}: {what} are off by {error:.1e}"


def check_bits(case: Case) -> None:
    from octavo.kernels import _ext

    _ext.set_threads(1)
    whole = run(case, [case.length])
    for threads in (1, 2, 3):
        _ext.set_threads(threads)
        for cuts in ([case.length], *CUTS):
            for mates in (False, True):
                y, state = run(case, cuts, mates=mates)
                what = f"{case.name}: cut into {cuts}, mates {mates}, {threads} threads"
                assert np.array_equal(y, whole[0]), f"{what}: other outputs"
                assert np.array_equal(state, whole[1]), f"{what}: another state"


def check_checkpoints(case: Case) -> None:
    kept = {0: 3, 6: 5, 35: 0, case.length - 1: 1}
    step = StateSegments.of(
        [case.length], source=[NO_STATE], target=[SLOT], checkpoints=[*kept.items(), (-1, 4)]
    )
    pool, y = call(case, case.pool(), step, case.rows)
    whole = run(case, [case.length])
    assert np.array_equal(bits(y), whole[0])
    assert np.array_equal(bits(pool)[SLOT], whole[1])
    for row, slot in kept.items():
        part = StateSegments.of([row + 1], source=[NO_STATE], target=[SLOT])
        alone, _ = call(case, case.pool(), part, [x[: row + 1] for x in case.rows])
        assert np.array_equal(bits(pool)[slot], bits(alone)[SLOT]), f"{case.name}: the state after row {row}"
    before = bits(pool)[5].copy()
    rest = StateSegments.of([case.length - 7], source=[5], target=[4])
    pool, y = call(case, pool, rest, [x[7:] for x in case.rows])
    assert np.array_equal(bits(y), whole[0][7:]), f"{case.name}: from the state after row 6"
    assert np.array_equal(bits(pool)[4], whole[1])
    assert np.array_equal(bits(pool)[5], before), f"{case.name}: a slot that is read only has changed"


def main() -> None:
    from octavo.kernels import _ext
    from octavo.kernels.cpu import recurrent

    mx.set_default_device(mx.cpu)
    names = set()
    for case in all_cases(recurrent):
        names.add(case.name)
        check_truth(case)
        check_bits(case)
        check_checkpoints(case)
    assert len(names) == sum(1 for _ in all_cases(recurrent))
    print("checked", _ext.isa())
