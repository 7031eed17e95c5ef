from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import ssm as mlx_lm_ssm

import recurrent_cases
from metal_backend import Emulator, needs_compiler
from metal_recurrent import check_blocks, metal_kernels
from octavo.kernels.metal.launch import KernelLibrary
from octavo.kernels.metal.recurrent import MetalRecurrences, SegmentArrays
from octavo.kernels.state_segments import NO_STATE, StateSegments
from recurrent_cases import LENGTH, Case, bits, causal_conv, gated_delta, run, ssd
from recurrent_checks import check_checkpoints, check_truth
from recurrent_parity import check_convolution, check_gated_delta, close, fresh

pytestmark = [pytest.mark.parity, needs_compiler, pytest.mark.timeout(300)]

KINDS: tuple[Callable[[Any], Iterator[Case]], ...] = (
    recurrent_cases.delta_cases,
    recurrent_cases.gate_cases,
    recurrent_cases.ssd_cases,
    recurrent_cases.conv_cases,
)
KERNELS = metal_kernels()
CASES = [case for cases in KINDS for case in cases(KERNELS)]
SMALL = (CASES[1], CASES[5], CASES[13], CASES[16])
"""Gated delta with a scalar and a vector gate, SSD, a convolution."""


def name_of(case: Case) -> str:
    return case.name


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)
    mx.random.seed(1)


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.few(9)
def test_outputs_and_states_are_those_of_float64(case: Case) -> None:
    check_truth(case)


@pytest.mark.parametrize("case", CASES[::2], ids=name_of)
@pytest.mark.few(4)
def test_a_sequence_has_bit_identical_results_however_it_is_cut(case: Case) -> None:
    whole = run(case, [LENGTH])
    for cuts, mates in (([LENGTH], True), ([3, 9, 1, 1, 13, 13], True), ([33, 7], False)):
        y, state = run(case, cuts, mates=mates)
        assert np.array_equal(y, whole[0]), f"cut into {cuts}: other outputs"
        assert np.array_equal(state, whole[1]), f"cut into {cuts}: another state"


@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_gates_of_a_long_segment_are_made_block_by_block(case: Case) -> None:
    check_blocks(case)


@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_states_are_kept_after_checkpoint_rows(case: Case) -> None:
    check_checkpoints(case)


segments = st.tuples(
    st.sampled_from([1, 1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 70]) | st.integers(1, 70),
    st.booleans(),
    st.booleans(),
    st.sets(st.integers(0, 69), max_size=2),
)
"""(rows, whether there is a state before, whether it keeps its slot, rows with snapshots)."""


@pytest.mark.parametrize("case", SMALL, ids=name_of)
@settings(max_examples=8)
@given(st.lists(segments, min_size=1, max_size=5), st.integers(0, 1000))
def test_ragged_segments_give_the_bits_of_each_alone(
    case: Case, drawn: list[tuple[int, bool, bool, set[int]]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    free = itertools.count()
    lengths, source, target, checkpoints, first = [], [], [], [], 0
    for length, goes_on, in_place, after in drawn:
        lengths.append(length)
        source.append(next(free) if goes_on else NO_STATE)
        target.append(source[-1] if goes_on and in_place else next(free))
        checkpoints += [(first + row, next(free)) for row in after if row < length]
        first += length
    unused = next(free)
    rng.shuffle(checkpoints)
    rows = [x[mx.array(rng.integers(0, LENGTH, first))] for x in case.rows]
    before = rng.standard_normal((unused + 1, *case.state)).astype(np.float32)
    step = StateSegments.of(lengths, source=source, target=target, checkpoints=checkpoints)
    step.check(unused + 1)
    pool = mx.array(before).astype(case.pool_dtype)
    together = call(case, pool, step, rows)
    assert np.array_equal(bits(pool)[unused], bits(mx.array(before).astype(case.pool_dtype))[unused])
    states = bits(pool)
    for start, length, read, written in step.segments.tolist():
        alone = mx.array(before).astype(case.pool_dtype)
        part = [x[start : start + length] for x in rows]
        kept = [(row - start, slot) for row, slot in checkpoints if start <= row < start + length]
        y = []
        cut = int(rng.integers(1, length + 1))
        for at, size in ((0, cut), (cut, length - cut)):
            here = [(row - at, slot) for row, slot in kept if at <= row < at + size]
            from_slot = read if at == 0 else written
            one = StateSegments.of([size], source=[from_slot], target=[written], checkpoints=here)
            if size:
                y.append(call(case, alone, one, [x[at : at + size] for x in part]))
        assert np.array_equal(np.concatenate(y), together[start : start + length])
        for slot in (written, *(slot for _, slot in kept)):
            assert np.array_equal(bits(alone)[slot], states[slot])


def call(case: Case, pool: mx.array, step: StateSegments, rows: list[mx.array]) -> Any:
    same, y = case.kernel(pool, case.arrays(step), *rows)
    assert same is pool
    return bits(y)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 2e-6), (mx.bfloat16, 2e-2)])
def test_gated_delta_is_mlx_lms(vector: bool, dtype: mx.Dtype, tolerance: float) -> None:
    check_gated_delta(KERNELS, dtype, tolerance, vector=vector)


def test_a_rate_for_each_value_of_a_gate_is_read() -> None:
    T, H, D = 5, 2, 16
    rows = [mx.random.normal(shape) / 4 for shape in ((T, H, D), (T, H, D), (T, H, D), (T, H, D), (T, H))]
    narrow, dt_bias = mx.random.normal((H, 1)), mx.random.normal((H, D))
    outputs = []
    for A_log in (narrow, mx.broadcast_to(narrow, (H, D)), mx.random.normal((H, D))):
        gates: dict[str, Any] = {"kind": "softplus", "A_log": A_log, "dt_bias": dt_bias}
        pool = mx.zeros((1, H, D, D))
        outputs.append(gated_delta(KERNELS, pool, SegmentArrays.of(fresh([T])), *rows, **gates)[1])
    assert np.array_equal(bits(outputs[0]), bits(outputs[1]))
    assert not close(outputs[2], outputs[0], 1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 5e-6), (mx.bfloat16, 2e-2)])
def test_ssd_is_mlx_lms(dtype: mx.Dtype, tolerance: float) -> None:
    T, H, G, Dh, Ds = 11, 4, 2, 16, 32
    x, B, C = (mx.random.normal((1, T, *s)).astype(dtype) for s in ((H, Dh), (G, Ds), (G, Ds)))
    dt = mx.random.normal((1, T, H)).astype(dtype)
    A_log, dt_bias, D = (mx.random.normal((H,)) for _ in range(3))
    limit = (0.001, 2.0)
    state, pool, source = None, mx.zeros((1, H, Dh, Ds)), NO_STATE
    for part in (slice(0, T - 1), slice(T - 1, T)):
        rows = [value[:, part] for value in (x, B, C, dt)]
        wanted, state = mlx_lm_ssm.ssm_update(
            rows[0], A_log, rows[1], rows[2], D, rows[3], dt_bias, state, limit
        )
        step = StateSegments.of([rows[0].shape[1]], source=[source], target=[0])
        _, y = ssd(
            KERNELS,
            pool,
            SegmentArrays.of(step),
            *(value[0] for value in rows),
            A_log=A_log,
            dt_bias=dt_bias,
            D=D,
            limits=limit,
        )
        assert y.dtype == dtype
        assert close(y, wanted[0], tolerance)
        assert close(pool, state, tolerance)
        source = 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 2e-6), (mx.bfloat16, 1e-2)])
def test_convolutions_are_mlx_own(dtype: mx.Dtype, tolerance: float) -> None:
    check_convolution(KERNELS, dtype, tolerance)


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_cpu_kernels_give_the_same(kind: int) -> None:
    cpu: Any = pytest.importorskip("octavo.kernels.cpu.recurrent", exc_type=ImportError)
    step = StateSegments.of([21, LENGTH - 21], source=[NO_STATE] * 2, target=[2, 4], checkpoints=[(7, 0)])
    for ours, theirs in zip(KINDS[kind](KERNELS), KINDS[kind](cpu), strict=True):
        results = []
        for case in (ours, theirs):
            pool, y = case.kernel(case.pool(), case.arrays(step), *case.rows)
            results.append((y, pool[mx.array([0, 2, 4])]))
        for metal, native in zip(*results, strict=True):
            assert metal.dtype == native.dtype
            assert close(metal, native, 1e-2 if metal.itemsize == 2 else 3e-6), ours.name


def test_a_nan_stays_in_its_own_sequence() -> None:
    step = SegmentArrays.of(fresh([2, 2]))
    x = mx.ones((4, 8))
    x[1] = float("nan")
    pool = mx.zeros((2, 2, 8))
    _, y = causal_conv(KERNELS, pool, step, x, mx.ones((3, 8)))
    assert np.isnan(np.array(y)).any(axis=1).tolist() == [False, True, False, False]
    assert np.isnan(np.array(pool)).any(axis=(1, 2)).tolist() == [True, False]
    rows = [mx.ones((4, 1, 16)) / 4 for _ in range(3)] + [mx.ones((4, 1)) / 2] * 2
    for spoilt in range(5):
        parts = [value + 0 for value in rows]
        parts[spoilt][1] = float("nan")
        pool = mx.zeros((2, 1, 16, 16))
        gates: dict[str, Any] = {"kind": "softplus", "A_log": mx.zeros(1), "dt_bias": mx.zeros(1)}
        _, y = gated_delta(KERNELS, pool, step, *parts, **gates)
        assert np.isnan(np.array(y)).any(axis=(1, 2)).tolist() == [False, True, False, False]
        assert spoilt == 0 or np.isnan(np.array(pool)).any(axis=(1, 2, 3)).tolist() == [True, False]
    dt = mx.ones((4, 1))
    dt[1] = float("nan")
    pool, one = mx.zeros((2, 1, 16, 16)), mx.ones(1)
    _, y = ssd(KERNELS, pool, step, *rows[:3], dt, A_log=one, dt_bias=one, D=one, limits=(0.1, 1.0))
    assert np.isnan(np.array(y)).any(axis=(1, 2)).tolist() == [False, True, False, False]
    assert np.isnan(np.array(pool)).any(axis=(1, 2, 3)).tolist() == [True, False]


def test_a_decoded_token_moves_its_state_once_in_whole_lines() -> None:
    """A state has 128 x 128 values per head, so 64 KB are read once and written once."""
    device = Emulator()
    kernels = MetalRecurrences(KernelLibrary(device.compile))
    H, D = 2, 128
    q, k, v = (mx.ones((1, H, D)) / D for _ in range(3))
    gate, of_head = mx.ones((1, H)) / 2, mx.ones(H)
    step = SegmentArrays.of(StateSegments.of([1], source=[1], target=[0]))
    gated_delta(kernels, mx.zeros((2, H, D, D)), step, q, k, v, gate, gate)
    ssd(kernels, mx.zeros((2, H, D, D)), step, q, k, v, gate, A_log=of_head, dt_bias=of_head, D=of_head)
    for _, result in device.results:
        read, written = result.traffic.read("pool"), result.traffic.written("to_pool")
        assert read.bytes == written.bytes == H * D * D * 4
        assert read.line_ratio == written.line_ratio == 1.0


def test_arrays_of_wrong_shape_are_refused() -> None:
    step, x, gate = SegmentArrays.of(fresh([2])), mx.ones((2, 1, 16)), mx.ones((2, 1))
    pool = mx.zeros((1, 1, 16, 16))
    with pytest.raises(ValueError, match="multiple of 16 values, at most 256, for the Metal kernels, got 24"):
        gated_delta(KERNELS, mx.zeros((1, 1, 16, 24)), step, x, x, x, gate, gate)
    with pytest.raises(ValueError, match=r"k must be \[2, 1, 16\], got mlx.core.float32 \[1, 1, 16\]"):
        gated_delta(KERNELS, pool, step, x, x[:1], x, gate, gate)
    with pytest.raises(ValueError, match="need A_log and dt_bias"):
        gated_delta(KERNELS, pool, step, x, x, x, gate, gate, kind="softplus")
    gates: dict[str, Any] = {"kind": "softplus", "A_log": mx.ones(1), "dt_bias": mx.ones(2)}
    with pytest.raises(ValueError, match=r"dt_bias must have 1 values \(a row of a\)"):
        gated_delta(KERNELS, pool, step, x, x, x, gate, gate, **gates)
    with pytest.raises(ValueError, match=r"pool must be mlx\.core.float32"):
        gated_delta(KERNELS, pool.astype(mx.bfloat16), step, x, x, x, gate, gate)
    with pytest.raises(ValueError, match=r"dtype mlx\.core\.bfloat16, got mlx\.core.float32"):
        causal_conv(KERNELS, mx.zeros((1, 2, 8), mx.bfloat16), step, mx.ones((2, 8)), mx.ones((3, 8)))
    with pytest.raises(ValueError, match="two taps or more"):
        causal_conv(KERNELS, mx.zeros((1, 0, 8)), step, mx.ones((2, 8)), mx.ones((1, 8)))
    with pytest.raises(ValueError, match="heads of keys must divide those of the state, got 2 and 1"):
        gated_delta(KERNELS, pool, step, mx.ones((2, 2, 16)), mx.ones((2, 2, 16)), x, gate, gate)


def test_a_device_whose_kernels_fail_their_self_test_computes_by_operations(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert Emulator().backend().recurrent_kernels is not None
    assert not caplog.records
    for kind, name in (("delta", "delta rule"), ("ssd", "SSD"), ("conv", "convolution")):
        caplog.clear()
        assert Emulator(forgets=(kind,)).backend().recurrent_kernels is None
        (record,) = caplog.records
        assert f"fail their self-test on this device ({name}: states have error" in record.getMessage()
