from __future__ import annotations

from native import require_extension

require_extension()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from attend_once import attend_once  # noqa: E402
from attention_cases import as_numpy, build_metadata  # noqa: E402
from format_rows import holds  # noqa: E402
from octavo.kernels import _ext  # noqa: E402
from octavo.kernels.cpu.backend import CpuPool  # noqa: E402
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec  # noqa: E402

pytestmark = pytest.mark.parity


class Batch:
    def __init__(
        self, formats: tuple[str, str], dtype: mx.Dtype, *, query_heads: int = 4, dim: int = 64
    ) -> None:
        self.lengths = ((1500, 1), (40, 9), (0, 33), (2200, 1), (5, 2))
        layer = LayerSpec(num_kv_heads=2, head_dim=dim, value_dim=dim, window=1800, keep=3)
        spec = PoolSpec(
            layers=(layer,), num_pages=300, page_size=16, k_format=formats[0], v_format=formats[1]
        )
        self.pool, rng, first = CpuPool(spec), np.random.default_rng(1), 0
        self.tables: list[NDArray[np.int32]] = []
        for old, new in self.lengths:
            count = -(-(old + new) // 16)
            self.tables.append(np.arange(first, first + count, dtype=np.int32))
            first += count
        self.rows = [
            [
                mx.array(rng.standard_normal((old + new, heads, dim)).astype(np.float32)).astype(dtype)
                for heads in (query_heads, 2, 2)
            ]
            for old, new in self.lengths
        ]
        everything = [(0, old + new) for old, new in self.lengths]
        self.pool.begin_step(build_metadata(everything, self.tables, 16))
        self.pool.write(0, *(mx.concatenate([rows[part] for rows in self.rows]) for part in (1, 2)))
        mx.eval(self.pool.pending())

    def attend(self, members: list[int]) -> dict[int, NDArray[np.float32]]:
        lengths = [self.lengths[i] for i in members]
        self.pool.begin_step(build_metadata(lengths, [self.tables[i] for i in members], 16))
        queries = mx.concatenate([self.rows[i][0][self.lengths[i][0] :] for i in members])
        out = as_numpy(self.pool.attend(0, queries, AttendOptions(scale=0.125)))
        ends = np.cumsum([new for _, new in lengths])
        return dict(zip(members, np.split(out, ends[:-1]), strict=True))

    def attend_part(self, member: int, first: int, stop: int) -> NDArray[np.float32]:
        self.pool.begin_step(build_metadata([(first, stop - first)], [self.tables[member]], 16))
        return as_numpy(self.pool.attend(0, self.rows[member][0][first:stop], AttendOptions(scale=0.125)))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("formats", [("bf16", "bf16"), ("fp4", "fp4"), ("fp16", "fp16")], ids=lambda f: f[0])
def test_neither_threads_nor_neighbours_change_a_bit(formats: tuple[str, str], dtype: mx.Dtype) -> None:
    batch = Batch(formats, dtype)
    before = _ext.threads()
    try:
        _ext.set_threads(1)
        want = batch.attend([0, 1, 2, 3, 4])
        for threads in (2, 4):
            _ext.set_threads(threads)
            for members in ([0, 1, 2, 3, 4], [4, 3, 1], [0], [3], [2, 0]):
                for member, rows in batch.attend(members).items():
                    np.testing.assert_array_equal(rows, want[member])
    finally:
        _ext.set_threads(before)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "formats",
    [
        ("bf16", "bf16"),
        ("fp4", "fp4"),
        ("fp16", "int8"),
        ("int8", "affine8"),
        ("mxfp4", "nvfp4"),
        ("nvfp4", "affine4"),
        ("affine4", "mxfp4"),
        ("affine8", "fp4"),
    ],
    ids="-".join,
)
def test_the_chunk_that_a_row_is_in_changes_no_bit(formats: tuple[str, str], dtype: mx.Dtype) -> None:
    batch = Batch(formats, dtype)
    old, new = batch.lengths[2]
    want = batch.attend([2])[2]
    for size in (1, 2, 5, 12, 17, new):
        for first in range(0, new, size):
            stop = min(first + size, new)
            np.testing.assert_array_equal(batch.attend_part(2, old + first, old + stop), want[first:stop])


@pytest.mark.parametrize(
    ("name", "group", "dim"),
    [
        (name, group, dim)
        for name in ("bf16", "fp16", "int8", "mxfp4", "nvfp4", "affine4", "affine8")
        for group, dim in ((1, 128), (3, 96), (4, 64), (2, 256), (4, 72))
        if holds(name, dim)
    ],
)
def test_few_rows_have_the_bits_of_many(name: str, group: int, dim: int) -> None:
    batch = Batch((name, name), mx.bfloat16, query_heads=2 * group, dim=dim)
    old, new = batch.lengths[2]
    want = batch.attend([2])[2]
    for row in range(0, new, 4):
        np.testing.assert_array_equal(batch.attend_part(2, old + row, old + row + 1), want[row : row + 1])
    for member in (0, 3):
        np.testing.assert_array_equal(batch.attend([member])[member], batch.attend([1, member])[member])


@pytest.mark.parametrize("name", ["bf16", "fp16", "mxfp4", "nvfp4"])
def test_few_rows_add_values_in_the_order_of_many(name: str) -> None:
    """The values cancel, so any other order of addition gives another rounding error."""
    rng = np.random.default_rng(6)
    values = (rng.standard_normal((128, 1, 64)) * 2.0 ** rng.integers(-8, 8, (128, 1, 64))).astype(np.float32)
    values[64:] = -values[rng.permutation(64)]
    queries, keys = np.zeros((20, 1, 64), np.float32), np.zeros((128, 1, 64), np.float32)
    want = attend_once(name, (queries, keys, values))[-1]
    for count in (1, 2, 3, 4, 5):
        np.testing.assert_array_equal(attend_once(name, (queries[:count], keys, values))[-1], want)


@pytest.mark.parametrize("name", ["bf16", "fp16", "mxfp4"])
def test_few_rows_score_keys_in_the_order_of_many(name: str) -> None:
    rng = np.random.default_rng(7)
    half = (rng.standard_normal((20, 1, 64)) * 2.0 ** rng.integers(-12, 12, (20, 1, 64))).astype(np.float32)
    queries = np.concatenate([half, -half], axis=-1)
    keys = np.tile(rng.standard_normal((128, 1, 64)).astype(np.float32), 2)
    values = rng.standard_normal((128, 1, 128)).astype(np.float32)
    want = attend_once(name, (queries, keys, values), scale=1e4)[-1]
    for count in (1, 2, 3, 4, 5):
        rows = (queries[-count:], keys, values)
        np.testing.assert_array_equal(attend_once(name, rows, scale=1e4)[-1], want)


def test_queries_need_not_be_contiguous() -> None:
    batch = Batch(("fp4", "fp4"), mx.bfloat16)
    want = batch.attend([1])[1]
    fused = mx.concatenate([mx.ones((9, 3, 64), mx.bfloat16), batch.rows[1][0][40:]], axis=1)
    got = as_numpy(batch.pool.attend(0, fused[:, 3:], AttendOptions(scale=0.125)))
    np.testing.assert_array_equal(got, want)
