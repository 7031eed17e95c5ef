from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from metal_backend import Emulator
from octavo.kernels.metal.launch import KernelLibrary
from octavo.kernels.metal.recurrent import MetalRecurrences
from octavo.kernels.state_segments import NO_STATE, StateSegments
from recurrent_cases import LENGTH, Case, call, floats, run
from recurrent_checks import check_checkpoints, check_truth

RANDOM_BLOCKS = 70


def metal_kernels() -> MetalRecurrences:
    return MetalRecurrences(KernelLibrary(Emulator().compile))


def check_recurrence(cases: Callable[[Any], Iterator[Case]]) -> None:
    for case in cases(metal_kernels()):
        check_truth(case)
        whole = run(case, [LENGTH])
        for cuts in ([LENGTH], [33, 7], [3, 9, 1, 1, 13, 13]):
            y, state = run(case, cuts, mates=True)
            assert np.array_equal(y, whole[0]), f"{case.name}: other outputs"
            assert np.array_equal(state, whole[1]), f"{case.name}: another state"
        check_checkpoints(case)
        check_blocks(case)
        check_nan(case)


def check_blocks(case: Case) -> None:
    rows = [x[mx.array(np.arange(RANDOM_BLOCKS) % LENGTH)] for x in case.rows]
    step = StateSegments.of([RANDOM_BLOCKS], source=[1], target=[3], checkpoints=[(64, 0), (65, 2)])
    before = np.random.default_rng(0).standard_normal((6, *case.state)).astype(np.float32)
    pool = mx.array(before).astype(case.pool_dtype)
    states = floats(pool)
    pool, y = call(case, pool, step, rows)
    exact = case.truth(states, step, *(floats(x) for x in rows))
    for what, got, truth in (("y", y, exact), ("states", pool, states)):
        error = np.abs(floats(got) - truth).max() / np.abs(truth).max()
        assert error <= (2.0**-8 if got.itemsize == 2 else 0.0) + 3e-6, (
            f"{case.name}: {what} off by {error:.1e}"
        )


def check_nan(case: Case) -> None:
    for spoilt in range(len(case.rows)):
        rows = [x[:6] + 0 for x in case.rows]
        rows[spoilt][1] = float("nan")
        step = StateSegments.of([3, 3], source=[NO_STATE] * 2, target=[0, 1])
        pool, y = call(case, case.pool(), step, rows)
        out = np.asarray(np.isnan(floats(y).reshape(6, -1)).any(axis=1))
        assert not out[0]
        assert out[1], f"{case.name}: NaN of input {spoilt} is lost"
        assert not out[3:].any()
        assert not np.isnan(floats(pool)[1]).any()
