from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metal_emulator import Result, emulate

# One threadgroup of 128 threads per row of x: its sum, and a shifted copy through threadgroup memory.
ROW_SUM = """
  threadgroup float sums[4], row[128];
  const uint thread_index = thread_index_in_threadgroup;
  const uint group = threadgroup_position_in_grid.x;
  const float value = x[group * 128 + thread_index];
  row[thread_index] = value;
  const float sum = simd_sum(value);
  if (thread_index_in_simdgroup == 0) sums[simdgroup_index_in_threadgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float neighbour = row[(thread_index + 1) % 128];
  float4 parts = float4(sums[0], sums[1], float2(sums[2], sums[3]));
  shifted[group * 128 + thread_index] = neighbour;
  if (thread_index == 0) total[group] = dot(parts, float4(1.0f));
"""
NUM_ROWS = 3

# D = 2 A B^T for 8x8 matrices: A through threadgroup memory, B from device memory.
MATRIX_PRODUCT = """
  threadgroup half tile[8 * 8];
  const uint lane = thread_index_in_simdgroup;
  tile[lane] = a[lane];
  tile[lane + 32] = a[lane + 32];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<half, 8, 8> left, right;
  simdgroup_matrix<float, 8, 8> product = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(left, tile, 8);
  simdgroup_load(right, b, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(product, left, right, product);
  product.thread_elements()[0] *= 2.0f;
  product.thread_elements()[1] *= 2.0f;
  simdgroup_store(product, d, 8);
"""


@dataclass(frozen=True)
class RowSums:
    total: NDArray[np.float32]
    shifted: NDArray[np.float32]


def rows() -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((NUM_ROWS, 128)).astype(np.float32)


def expected_row_sums() -> RowSums:
    return RowSums(rows().sum(axis=1), np.roll(rows(), -1, axis=1))


def run_row_sum(body: str = ROW_SUM, **options: Any) -> Result:
    return emulate(
        "row_sum",
        ["x"],
        ["total", "shifted"],
        body,
        inputs=[rows()],
        output_shapes=[(NUM_ROWS,), (NUM_ROWS, 128)],
        output_dtypes=[np.float32, np.float32],
        grid=(NUM_ROWS * 128, 1, 1),
        threadgroup=(128, 1, 1),
        **options,
    )


def run_matrix_product(body: str = MATRIX_PRODUCT, **options: Any) -> Result:
    generator = np.random.default_rng(1)
    a, b = (generator.standard_normal((8, 8)).astype(np.float16) for _ in range(2))
    result = emulate(
        "product",
        ["a", "b"],
        ["d"],
        body,
        inputs=[a, b],
        output_shapes=[(8, 8)],
        output_dtypes=[np.float32],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        **options,
    )
    expected = 2 * a.astype(np.float32) @ b.astype(np.float32).T
    np.testing.assert_allclose(result.outputs[0], expected, rtol=0, atol=1e-5)
    return result


def run_one(body: str, *, threads: int = 1, threadgroup: int | None = None, **options: Any) -> Result:
    """Run a kernel with input ``x`` (by default float32, 64 elements) and 64 float32 outputs."""
    values = options.pop("x", np.arange(64, dtype=np.float32))
    arguments: dict[str, Any] = {
        "output_shapes": [(64,)],
        "output_dtypes": [np.float32],
        "init_value": 0.0,
        "grid": (threads, 1, 1),
        "threadgroup": (threadgroup or threads, 1, 1),
    }
    return emulate("one", ["x"], ["out"], body, inputs=[values], **(arguments | options))
