"""Native recurrences against float64 and mlx-lm, and what they refuse."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.activations import silu
from mlx.nn.layers.convolution import Conv1d
from mlx_lm.models import gated_delta as mlx_lm_delta

from native import at_every_level, require_extension, run_at_level

_ext = require_extension()

from octavo.kernels.cpu import recurrent  # noqa: E402
from octavo.kernels.cpu.recurrent import StateArrays  # noqa: E402
from octavo.kernels.recurrent_kernels import DeltaGates  # noqa: E402
from octavo.kernels.state_segments import NO_STATE, StateSegments  # noqa: E402

pytestmark = pytest.mark.parity


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)
    mx.random.seed(1)


def close(a: mx.array, b: mx.array, tolerance: float) -> bool:
    x, y = (np.array(value.astype(mx.float32)) for value in (a, b))
    return bool(np.abs(x - y).max() <= tolerance * np.abs(y).max())


def fresh(lengths: list[int]) -> StateArrays:
    """Segments of new sequences, each in the slot of its number."""
    step = StateSegments.of(lengths, source=[NO_STATE] * len(lengths), target=range(len(lengths)))
    step.check(len(lengths))
    return StateArrays.of(step)


@at_every_level
def test_every_level_agrees_with_float64_and_with_itself(level: str) -> None:
    assert (
        run_at_level(level, "import recurrent_checks; recurrent_checks.main()").strip() == f"checked {level}"
    )


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 2e-6), (mx.bfloat16, 2e-2)])
def test_gated_delta_is_mlx_lms(vector: bool, dtype: mx.Dtype, tolerance: float) -> None:
    T, Hk, Hv, D = 9, 2, 4, 32
    q, k = (mx.fast.rms_norm(mx.random.normal((1, T, Hk, D)), None, 1e-6) / D for _ in range(2))
    v, b = mx.random.normal((1, T, Hv, D)), mx.random.normal((1, T, Hv))
    a = mx.random.normal((1, T, Hv, D) if vector else (1, T, Hv))
    A_log, dt_bias = mx.random.normal((Hv, 1) if vector else (Hv,)), mx.random.normal(a.shape[2:])
    q, k, v, a, b = (x.astype(dtype) for x in (q, k, v, a, b))
    for bound in (None, -4.0):
        wanted, state = mlx_lm_delta.gated_delta_update(
            q, k, v, a, b, A_log, dt_bias, lower_bound=bound, allow_neg_eigval=True
        )
        gates = DeltaGates(
            kind="softplus" if bound is None else "bounded",
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=bound or 0.0,
            beta_scale=2.0,
        )
        rows = [x[0] for x in (q, k, v, a, b)]
        pool, y = recurrent.gated_delta(mx.zeros((1, Hv, D, D)), fresh([T]), *rows, gates=gates)
        assert y.dtype == dtype
        assert close(y, wanted[0], tolerance)
        assert close(pool, state, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 2e-6), (mx.bfloat16, 1e-2)])
def test_convolutions_are_mlx_own(dtype: mx.Dtype, tolerance: float) -> None:
    layer = Conv1d(48, 48, 4, groups=48, bias=True)
    layer.set_dtype(dtype)
    x = mx.random.normal((11, 48)).astype(dtype)
    wanted = silu(layer(mx.pad(x, [(3, 0), (0, 0)])[None]))[0]
    weight = mx.contiguous(layer.weight[..., 0].T)
    pool, y = recurrent.causal_conv(
        mx.zeros((1, 3, 48), dtype), fresh([11]), x, weight, layer.bias, silu=True
    )
    assert y.dtype == dtype
    assert close(y, wanted, tolerance)
    assert mx.array_equal(pool[0], x[-3:])


def test_inputs_may_be_parts_of_wider_rows() -> None:
    """As a model splits what one layer gives."""
    T, H, D = 5, 2, 16
    wide = mx.random.normal((T, 3 * H * D))
    q, k, v = (x.reshape(T, H, D) for x in mx.split(wide, 3, axis=-1))
    gates = mx.sigmoid(mx.random.normal((T, 2 * H)))
    parts = [q, k, v, gates[:, ::2], gates[:, H:]]
    _, y = recurrent.gated_delta(mx.zeros((1, H, D, D)), fresh([T]), *parts)
    _, wanted = recurrent.gated_delta(mx.zeros((1, H, D, D)), fresh([T]), *map(mx.contiguous, parts))
    assert mx.array_equal(y, wanted)
    _, y = recurrent.causal_conv(mx.zeros((1, 2, 32)), fresh([T]), wide[:, 32:64], mx.ones((3, 32)))
    _, wanted = recurrent.causal_conv(
        mx.zeros((1, 2, 32)), fresh([T]), mx.contiguous(wide[:, 32:64]), mx.ones((3, 32))
    )
    assert mx.array_equal(y, wanted)


def test_a_pool_is_written_in_place() -> None:
    pool = mx.zeros((3, 2, 8))
    mx.eval(pool)
    memory = np.asarray(pool)
    new, y = recurrent.causal_conv(pool, fresh([2]), mx.ones((2, 8)), mx.ones((3, 8)))
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
        pools[0], wanted = recurrent.gated_delta(pools[0], StateArrays.of(step), *rows)
        mx.eval(pools[0], wanted)
    arrays = StateArrays.of(first)
    mx.eval(arrays.segments, arrays.checkpoints)
    memory = np.asarray(pools[1])
    pool, y = recurrent.gated_delta(pools[1], arrays, *rows)
    program = _ext.Program(_ext.Arena(), [arrays.segments, arrays.checkpoints], [pools[1]], [pool, y])
    for step in (first, later, first):
        program.run([step.segments, step.checkpoints])
    assert mx.array_equal(program.outputs[1], wanted)
    assert np.array_equal(memory, np.asarray(pools[0]))


def test_a_nan_stays_in_its_own_sequence() -> None:
    x = mx.ones((4, 8))
    x[1] = float("nan")
    pool, y = recurrent.causal_conv(mx.zeros((2, 2, 8)), fresh([2, 2]), x, mx.ones((3, 8)))
    assert np.isnan(np.array(y)).any(axis=1).tolist() == [False, True, False, False]
    assert np.isnan(np.array(pool)).any(axis=(1, 2)).tolist() == [True, False]
    rows = [mx.ones((4, 1, 16)) / 4 for _ in range(3)] + [mx.ones((4, 1)) / 2] * 2
    rows[2][1, 0, 0] = float("nan")
    pool, y = recurrent.gated_delta(mx.zeros((2, 1, 16, 16)), fresh([2, 2]), *rows)
    assert np.isnan(np.array(y)).any(axis=(1, 2)).tolist() == [False, True, False, False]
    assert np.isnan(np.array(pool)).any(axis=(1, 2, 3)).tolist() == [True, False]


def test_what_does_not_fit_is_refused() -> None:
    step, x = fresh([2]), mx.ones((2, 1, 16))
    gate = mx.ones((2, 1))
    with pytest.raises(ValueError, match="multiple of 16, at most 256, got 24"):
        recurrent.gated_delta(mx.zeros((1, 1, 16, 24)), step, x, x, x, gate, gate)
    with pytest.raises(ValueError, match=r"k must be .* \[2, 1, 16\], got float32 \[1, 1, 16\]"):
        recurrent.gated_delta(mx.zeros((1, 1, 16, 16)), step, x, x[:1], x, gate, gate)
    with pytest.raises(ValueError, match="need A_log and dt_bias"):
        recurrent.gated_delta(
            mx.zeros((1, 1, 16, 16)), step, x, x, x, gate, gate, gates=DeltaGates(kind="softplus")
        )
    with pytest.raises(ValueError, match="does not hold inputs of float32"):
        recurrent.causal_conv(mx.zeros((1, 2, 8), mx.bfloat16), step, mx.ones((2, 8)), mx.ones((3, 8)))
    assert not recurrent.takes_gated_delta(24)
    assert recurrent.takes_gated_delta(128)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_rows_whose_state_is_not_finite_are_marked(dtype: mx.Dtype) -> None:
    step = StateSegments.of([3, 0, 4], source=[0, 1, 2], checkpoints=[(4, 3), (-1, 0)])
    arrays = StateArrays.of(step)
    y = np.full((7, 2, 5), 60_000.0, np.float32)  # a sum of them overflows in 16 bits, and is no infinity
    marks = {2: np.nan, 4: np.inf, 5: np.nan, 6: -np.inf}  # row 5 leaves its state to nobody
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
