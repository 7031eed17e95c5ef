from __future__ import annotations

from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from metal_emulator import FAST_MATH, NO_CONTRACTION, MetalKernel, emulate, find_compiler, why_unavailable
from metal_emulator.compiler import COMPILER_VARIABLE
from metal_emulator.tensors import METAL_TYPES
from metal_samples import ROW_SUM, run_one, run_row_sum

pytestmark = [pytest.mark.emulator, pytest.mark.slow]

needs_compiler = pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or "")


@needs_compiler
def test_it_is_called_as_mlx_kernels_are() -> None:
    kernel = MetalKernel(
        name="scaled",
        input_names=["x", "scale", "offset"],
        output_names=["out"],
        source="""
          const uint i = thread_position_in_grid.x;
          const T value = x[elem_to_loc(i, x_shape, x_strides, x_ndim)];
          out[i] = T(float(value) * scale + offset[N]);
        """,
    )
    x = mx.random.normal((5, 7)).astype(mx.bfloat16)
    (out,) = kernel(
        inputs=[x, 2.5, mx.array([1.0, 2.0])],
        template=[("T", mx.bfloat16), ("N", 1)],
        grid=(x.size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[mx.bfloat16],
        stream=mx.cpu,
    )
    expected = (x.astype(mx.float32) * 2.5 + 2.0).astype(mx.bfloat16)
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(out.astype(np.float32), np.array(expected.astype(mx.float32)))
    assert kernel.last is not None
    assert kernel.last.reports == []


@needs_compiler
@pytest.mark.parametrize(
    "dtype",
    [np.dtype(name) for name in METAL_TYPES if name != "bfloat16"] + [np.dtype(ml_dtypes.bfloat16)],
    ids=str,
)
def test_every_type_returns_as_it_went_in(dtype: np.dtype[Any]) -> None:
    values = np.array([0, 1, 1, 0, 100, 3, 7, 2, 1], dtype)
    result = emulate(
        "copy",
        ["x"],
        ["out"],
        "const uint i = thread_position_in_grid.x; out[i] = x[i];",
        inputs=[values],
        output_shapes=[(3, 3)],
        output_dtypes=[values.dtype],
        grid=(9, 1, 1),
        threadgroup=(4, 1, 1),  # the last group is smaller
    )
    assert result.outputs[0].dtype == values.dtype
    np.testing.assert_array_equal(result.outputs[0], values.reshape(3, 3))


@needs_compiler
def test_half_operations_round_each_and_literals_are_float() -> None:
    a, b, c, d = (np.float16(v) for v in (1.001, 3.003, -3.0, 3.0))
    body = """
      const half product_and_sum = x[0] * x[1] + x[2];
      out[0] = float(product_and_sum);
      out[1] = float(x[3]) * 0.1 - 0.3;
    """
    halves = np.array([a, b, c, d] * 4, np.float16)
    result = run_one(body, x=halves, extra_flags=NO_CONTRACTION)
    assert result.outputs[0][0] == np.float32(np.float16(a * b) + c)
    assert result.outputs[0][1] == np.float32(d) * np.float32(0.1) - np.float32(0.3)


@needs_compiler
def test_products_and_sums_are_contracted_as_the_hardware_does() -> None:
    """With a single rounding, ``d * 0.1 - 0.3`` keeps the rounding error of 0.1."""
    body = "out[0] = x[0] * 0.1 - 0.3;"
    result = run_one(body, x=np.full(16, 3, np.float32))
    exact = 3.0 * float(np.float32(0.1)) - float(np.float32(0.3))
    assert result.outputs[0][0] == np.float32(exact)
    assert np.float32(exact) != np.float32(3) * np.float32(0.1) - np.float32(0.3)


@needs_compiler
def test_a_seed_repeats_a_schedule() -> None:
    racy = ROW_SUM.replace("mem_flags::mem_threadgroup", "mem_flags::mem_none")

    def reports(seed: int) -> list[str]:
        return run_row_sum(racy, seed=seed, raise_on_report=False).reports

    assert reports(1) == reports(1)
    assert len({tuple(reports(seed)) for seed in range(5)}) == 5
    assert run_row_sum(seed=3).traffic == run_row_sum(seed=3).traffic


@needs_compiler
def test_schedules_differ_in_the_first_thread() -> None:
    def order(schedule: str, seed: int = 0) -> list[int]:
        result = emulate(
            "tickets",
            ["x"],
            ["next", "who"],
            "const uint ticket = atomic_fetch_add_explicit(&next[0], 1, memory_order_relaxed);"
            "atomic_store_explicit(&who[ticket], thread_position_in_grid.x, memory_order_relaxed);",
            inputs=[0],
            output_shapes=[(1,), (128,)],
            output_dtypes=[np.uint32, np.uint32],
            init_value=0,
            atomic_outputs=True,
            grid=(128, 1, 1),
            threadgroup=(64, 1, 1),
            schedule=schedule,
            seed=seed,
        )
        return [int(thread) for thread in result.outputs[1]]

    assert order("inorder") == order("inorder", seed=1) == list(range(128))
    assert order("random") != order("random", seed=1)
    # in each threadgroup, the last simdgroup finishes before the first begins
    simdgroups = [thread // 32 % 2 for thread in order("reverse")]
    assert simdgroups == ([1] * 32 + [0] * 32) * 2
    assert len({tuple(order("greedy", seed=seed)) for seed in range(4)}) == 4
    assert {order("reverse", seed=seed)[0] // 64 for seed in range(8)} == {0, 1}
    assert sorted(order("mixed")) == list(range(128))


@needs_compiler
def test_denormals_are_zero_by_default() -> None:
    tiny = np.full(64, 1e-39, np.float32)
    assert run_one("out[0] = x[0] * 2;", x=tiny).outputs[0][0] == 0
    assert run_one("out[0] = x[0] * 2;", x=tiny, ftz=False).outputs[0][0] == np.float32(2e-39)


@needs_compiler
def test_fast_math_reveals_kernels_that_need_infinities() -> None:
    body = """
      const float lowest = -INFINITY;
      const float m = max(lowest, x[0] - INFINITY);
      out[0] = m == -INFINITY ? 1.0f : 0.0f;
    """
    ones = np.ones(64, np.float32)
    assert run_one(body, x=ones).outputs[0][0] == 1.0
    assert run_one(body, x=ones, extra_flags=FAST_MATH).outputs[0][0] != 1.0
    finite = "out[0] = exp2(max(Limits<float>::finite_min, x[0]) - x[0]);"
    assert run_one(finite, x=ones, extra_flags=FAST_MATH).outputs[0][0] == 1.0


def test_without_a_compiler_the_reason_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    find_compiler.cache_clear()
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv(COMPILER_VARIABLE, raising=False)
    monkeypatch.setattr("shutil.which", lambda _name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    try:
        reason = why_unavailable()
        assert reason is not None
        assert "pip install ziglang" in reason
    finally:
        find_compiler.cache_clear()
