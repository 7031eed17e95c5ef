from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from native import at_every_level, require_extension, run_at_level
from recurrent_cases import causal_conv, gated_delta
from recurrent_parity import check_convolution, check_gated_delta, fresh

_ext = require_extension()

from octavo.kernels.cpu import recurrent  # noqa: E402
from octavo.kernels.cpu.recurrent import StateArrays  # noqa: E402
from octavo.kernels.state_segments import StateSegments  # noqa: E402

pytestmark = pytest.mark.parity


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)
    mx.random.seed(1)


def new_arrays(lengths: list[int]) -> StateArrays:
    return StateArrays.of(fresh(lengths))


@at_every_level
def test_every_level_agrees_with_float64_and_with_itself(level: str) -> None:
    assert (
        run_at_level(level, "import recurrent_checks; recurrent_checks.main()").strip() == f"checked {level}"
    )


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 2e-6), (mx.bfloat16, 2e-2)])
def test_gated_delta_is_mlx_lms(vector: bool, dtype: mx.Dtype, tolerance: float) -> None:
    check_gated_delta(recurrent, dtype, tolerance, vector=vector)


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 2e-6), (mx.bfloat16, 1e-2)])
def test_convolutions_are_mlx_own(dtype: mx.Dtype, tolerance: float) -> None:
    check_convolution(recurrent, dtype, tolerance)


def test_inputs_may_be_parts_of_wider_rows() -> None:
    T, H, D = 5, 2, 16
    wide = mx.random.normal((T, 3 * H * D))
    q, k, v = (x.reshape(T, H, D) for x in mx.split(wide, 3, axis=-1))
    gates = mx.sigmoid(mx.random.normal((T, 2 * H)))
    parts = [q, k, v, gates[:, ::2], gates[:, H:]]
    _, y = gated_delta(recurrent, mx.zeros((1, H, D, D)), new_arrays([T]), *parts)
    _, wanted = gated_delta(recurrent, mx.zeros((1, H, D, D)), new_arrays([T]), *map(mx.contiguous, parts))
    assert mx.array_equal(y, wanted)
    _, y = causal_conv(recurrent, mx.zeros((1, 2, 32)), new_arrays([T]), wide[:, 32:64], mx.ones((3, 32)))
    _, wanted = causal_conv(
        recurrent, mx.zeros((1, 2, 32)), new_arrays([T]), mx.contiguous(wide[:, 32:64]), mx.ones((3, 32))
    )
    assert mx.array_equal(y, wanted)


def test_a_convolution_may_have_strided_weights() -> None:
    x, wide = mx.random.normal((5, 32)), mx.random.normal((3, 96))
    weight, bias = wide[::-1, 32:64], wide[0, ::3]
    _, y = causal_conv(recurrent, mx.zeros((1, 2, 32)), new_arrays([5]), x, weight, bias)
    whole = mx.contiguous(weight), mx.contiguous(bias)
    _, wanted = causal_conv(recurrent, mx.zeros((1, 2, 32)), new_arrays([5]), x, *whole)
    assert mx.array_equal(y, wanted)


def test_a_pool_is_written_in_place() -> None:
    pool = mx.zeros((3, 2, 8))
    mx.eval(pool)
    memory = np.asarray(pool)
    new, y = causal_conv(recurrent, pool, new_arrays([2]), mx.ones((2, 8)), mx.ones((3, 8)))
    mx.eval(new, y)
    assert (memory[0] == 1).all()
    assert (memory[1:] == 0).all()


def test_recorded_programs_take_other_slots_in_every_run() -> None:
    T, H, D = 3, 2, 16
    rows = [mx.random.normal((T, H, D)) / 4 for _ in range(3)] + [mx.sigmoid(mx.random.normal((T, H)))] * 2
    first = StateSegments.of([1, 2], source=[0, 1], checkpoints=[(-1, 0)])
    later = StateSegments.of([2, 1], source=[3, 2], checkpoints=[(0, 1)])
    pools = [mx.random.normal((4, H, D, D)) for _ in range(2)]
    pools[1] = pools[0] + 0
    mx.eval(rows, pools)
    for step in (first, later, first):
        pools[0], wanted = gated_delta(recurrent, pools[0], StateArrays.of(step), *rows)
        mx.eval(pools[0], wanted)
    arrays = StateArrays.of(first)
    mx.eval(arrays.segments, arrays.checkpoints)
    memory = np.asarray(pools[1])
    pool, y = gated_delta(recurrent, pools[1], arrays, *rows)
    program = _ext.Program(_ext.Arena(), [arrays.segments, arrays.checkpoints], [pools[1]], [pool, y])
    for step in (first, later, first):
        program.run([step.segments, step.checkpoints])
    assert mx.array_equal(program.outputs[1], wanted)
    assert np.array_equal(memory, np.asarray(pools[0]))


def test_a_nan_stays_in_its_own_sequence() -> None:
    x = mx.ones((4, 8))
    x[1] = float("nan")
    pool, y = causal_conv(recurrent, mx.zeros((2, 2, 8)), new_arrays([2, 2]), x, mx.ones((3, 8)))
    assert np.isnan(np.array(y)).any(axis=1).tolist() == [False, True, False, False]
    assert np.isnan(np.array(pool)).any(axis=(1, 2)).tolist() == [True, False]
    rows = [mx.ones((4, 1, 16)) / 4 for _ in range(3)] + [mx.ones((4, 1)) / 2] * 2
    rows[2][1, 0, 0] = float("nan")
    pool, y = gated_delta(recurrent, mx.zeros((2, 1, 16, 16)), new_arrays([2, 2]), *rows)
    assert np.isnan(np.array(y)).any(axis=(1, 2)).tolist() == [False, True, False, False]
    assert np.isnan(np.array(pool)).any(axis=(1, 2, 3)).tolist() == [True, False]


def test_arrays_of_wrong_shape_are_refused() -> None:
    step, x = new_arrays([2]), mx.ones((2, 1, 16))
    gate = mx.ones((2, 1))
    with pytest.raises(ValueError, match="multiple of 16, at most 256, got 24"):
        gated_delta(recurrent, mx.zeros((1, 1, 16, 24)), step, x, x, x, gate, gate)
    with pytest.raises(ValueError, match=r"k must be .* \[2, 1, 16\], got float32 \[1, 1, 16\]"):
        gated_delta(recurrent, mx.zeros((1, 1, 16, 16)), step, x, x[:1], x, gate, gate)
    with pytest.raises(ValueError, match="need A_log and dt_bias"):
        mx.eval(gated_delta(recurrent, mx.zeros((1, 1, 16, 16)), step, x, x, x, gate, gate, kind="softplus"))
    with pytest.raises(ValueError, match="does not hold inputs of float32"):
        causal_conv(recurrent, mx.zeros((1, 2, 8), mx.bfloat16), step, mx.ones((2, 8)), mx.ones((3, 8)))
    with pytest.raises(ValueError, match="causal_conv needs 1 options, got 0"):
        recurrent.recurrence("causal_conv", mx.zeros((1, 2, 8)), step, [mx.ones((2, 8)), mx.ones((3, 8))])
    assert not recurrent.takes("gated_delta", 24)
    assert recurrent.takes("gated_delta", 128)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_rows_whose_state_is_not_finite_are_marked(dtype: mx.Dtype) -> None:
    step = StateSegments.of([3, 0, 4], source=[0, 1, 2], checkpoints=[(4, 3), (-1, 0)])
    arrays = StateArrays.of(step)
    y = np.full((7, 2, 5), 60_000.0, np.float32)  # the sum overflows in 16 bits but must stay finite
    marks = {2: np.nan, 4: np.inf, 5: np.nan, 6: -np.inf}
    for row, value in marks.items():
        y[row, 1, row % 5] = value
    flags = mx.array(np.array([7, 0, 0, 0, 0, 0, 0], np.int32))
    out = recurrent.mark_nonfinite(flags, arrays, mx.array(y).astype(dtype))
    assert out.tolist() == [7, 0, 1, 0, 1, 0, 1]
    finite = mx.where(mx.isfinite(mx.array(y)), mx.array(y), 1).astype(dtype)
    zeros = mx.array(np.zeros(7, np.int32))
    assert recurrent.mark_nonfinite(zeros, arrays, finite).tolist() == [0] * 7
    with pytest.raises(ValueError, match=r"flags must be int32 \[7\], got int32 \[6\]"):
        recurrent.mark_nonfinite(mx.array(np.zeros(6, np.int32)), arrays, finite)
