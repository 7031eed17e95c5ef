"""The Metal attention kernels, executed from their source, against float64.

The pool is larger than its tables and poisoned with NaN, so wrong reads fail."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from attention_backends import poison
from attention_cases import Case, as_numpy, build_metadata, run_case
from metal_backend import Emulator, needs_compiler
from metal_cases import (
    EVERYTHING,
    LONG,
    TOLERANCES,
    WatchedPool,
    case_id,
    covering,
    ragged,
    run_watched,
    shape,
    whole_grid,
)
from metal_emulator import FAST_MATH
from octavo.kernels.interface import AttendOptions

pytestmark = [pytest.mark.parity, needs_compiler, pytest.mark.timeout(300)]
FP4 = ("fp4", "fp4")


@pytest.mark.parametrize(("case", "formats", "dtype"), tuple(covering()), ids=case_id)
@pytest.mark.few(6)
def test_equals_truth(case: Case, formats: tuple[str, str], dtype: mx.Dtype) -> None:
    outcome, emulator = run_watched(case, formats, dtype)
    assert outcome.error < TOLERANCES[dtype]
    assert all(result.reports == [] for _, result in emulator.results)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "formats", "dtype"), tuple(whole_grid()), ids=case_id)
def test_equals_truth_on_the_whole_grid(case: Case, formats: tuple[str, str], dtype: mx.Dtype) -> None:
    outcome, _ = run_watched(case, formats, dtype)
    assert outcome.error < TOLERANCES[dtype]


def test_every_schedule_gives_bit_identical_results() -> None:
    outs = []
    for seed, schedule in ((0, "inorder"), (1, "random"), (2, "greedy"), (3, "reverse"), (4, "mixed")):
        outcome, _ = run_watched(EVERYTHING, FP4, mx.float16, emulator=Emulator(seed=seed, schedule=schedule))
        outs.append(outcome.got)
    assert all((out == outs[0]).all() for out in outs)


@pytest.mark.parametrize("case", [EVERYTHING, LONG], ids=case_id)
def test_fast_math_changes_little(case: Case) -> None:
    outcome, _ = run_watched(case, FP4, mx.float16, emulator=Emulator(extra_flags=FAST_MATH))
    assert outcome.error < TOLERANCES[mx.float16]


def test_long_rows_are_split_and_rows_beside_them_take_no_more_launches() -> None:
    outcome, emulator = run_watched(LONG, FP4, mx.float16)
    assert outcome.error < TOLERANCES[mx.float16]
    assert len(emulator.ran("reduce")) == 1
    assert [name for name, _ in emulator.results if name.startswith("octavo_decode")] == [
        name for name, _ in emulator.results if name.endswith("_split")
    ]
    assert len(emulator.ran("decode")) == 1
    assert emulator.ran("chunk") == []


def test_a_sequence_gets_bit_identical_results_in_any_batch() -> None:
    case = shape("", 64, 2, 16, sequences=((540, 1), (20, 1), (0, 19)))
    crowd = Case(name="crowd", sequences=(*case.sequences, *ragged(16)), page_size=16)
    rng = np.random.default_rng(3)
    pages = rng.permutation(crowd.spec(*FP4).num_pages).astype(np.int32)
    widths = [-(-(old + new) // 16) for old, new in crowd.sequences]
    tables = np.split(pages, np.cumsum(widths))[: len(widths)]
    lengths = [old + new for old, new in crowd.sequences]
    inputs = [
        [rng.standard_normal((n, heads, 64)).astype(np.float32) for heads in (4, 2, 2)] for n in lengths
    ]

    def serve(members: int, *, at: int = 0) -> list[np.ndarray]:
        pool = WatchedPool(crowd.spec(*FP4), Emulator())
        poison(pool)
        for sequences in ([(0, old) for old, _ in crowd.sequences], list(crowd.sequences)):
            chosen = sequences[at : at + members]
            metadata = build_metadata(chosen, tables[at : at + members], 16)
            mine = list(zip(inputs[at:], chosen, strict=False))
            q, k, v = (mx.array(np.concatenate([x[i][a : a + n] for x, (a, n) in mine])) for i in range(3))
            pool.begin_step(metadata)
            pool.write(0, k, v)
            mx.eval(pool.pending())
        return np.split(as_numpy(pool.attend(0, q, AttendOptions(scale=0.125))), metadata.q_start[1:-1])

    alone, together = serve(3), serve(len(crowd.sequences))
    for a, b in zip(alone, together, strict=False):
        np.testing.assert_array_equal(a, b)
    short = serve(1, at=1)
    np.testing.assert_array_equal(short[0], together[1])


def test_float32_activations_lose_nothing_to_16_bits() -> None:
    pool = WatchedPool(EVERYTHING.spec(*FP4), Emulator())
    poison(pool)
    assert run_case(EVERYTHING, pool, dtype=mx.float32).error < TOLERANCES[mx.float32]


def test_many_layers_share_a_step() -> None:
    emulator = Emulator()
    for window in (None, 20):
        case = shape("", 64, 2, 16, window=window, sequences=((70, 1), (0, 5)))
        pool = emulator.backend().create_pool(case.spec(*FP4))
        poison(pool)
        assert run_case(case, pool, dtype=mx.float16).error < TOLERANCES[mx.float16]
