from __future__ import annotations

from native import at_every_level, require_extension, run_at_level

require_extension()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from cpu_pages import any_rows, digest, expected_pages, hard_rows, make_spec, write_step, written_pages  # noqa: E402
from format_rows import formats_and_dims  # noqa: E402
from octavo.kernels import FORMATS_WITH_KERNELS, _ext, page_format  # noqa: E402
from octavo.kernels.cpu.backend import CpuPool  # noqa: E402
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec  # noqa: E402

DIMS = (8, 16, 24, 32, 64, 80, 96, 128, 192, 256)


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize(("name", "dim"), formats_and_dims(*DIMS, names=FORMATS_WITH_KERNELS))
def test_pages_are_bit_equal_to_the_numpy_format(name: str, dim: int, page_size: int) -> None:
    spec = make_spec(name, name, dim=dim, value_dim=dim, page_size=page_size)
    capacity = spec.num_pages * page_size
    slots = np.random.default_rng(dim).permutation(capacity)[: min(capacity, 180)].astype(np.int32)
    keys, values = (hard_rows(len(slots), 2, dim, seed) for seed in (3, 4))
    pages, reported = written_pages(spec, slots, mx.array(keys), mx.array(values))
    want = expected_pages(spec, slots, keys, values)
    assert pages.shape == want.shape
    np.testing.assert_array_equal(pages, want)
    storable = [page_format(name).store(rows)[2].all(-1) for rows in (keys, values)]
    assert reported == np.flatnonzero(~(storable[0] & storable[1])).tolist()


@pytest.mark.parametrize(("name", "dim"), formats_and_dims(32, 64, 128, 192, names=FORMATS_WITH_KERNELS))
def test_any_floats_are_stored_as_the_format_says_or_reported(name: str, dim: int) -> None:
    spec = make_spec(name, name, dim=dim, value_dim=dim, page_size=32)
    slots = np.arange(240, dtype=np.int32)
    keys, values = (any_rows(len(slots), 2, dim, seed) for seed in (10, 11))
    pages, reported = written_pages(spec, slots, mx.array(keys), mx.array(values))
    with np.errstate(all="ignore"):
        want = expected_pages(spec, slots, keys, values)
        storable = [page_format(name).store(rows)[2].all(-1) for rows in (keys, values)]
    np.testing.assert_array_equal(pages, want)
    assert reported == np.flatnonzero(~(storable[0] & storable[1])).tolist()
    assert set(range(180, 240)) <= set(reported)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_whose_scales_nearly_tie_get_the_scale_of_the_definition(dim: int) -> None:
    rng = np.random.default_rng(dim)
    spec = make_spec("fp4", "fp4", dim=dim, value_dim=dim, page_size=64)
    shape = (spec.num_pages * 64, 2, dim)
    grid = np.array([0, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6], np.float32)
    kinds = (
        rng.integers(-12, 13, shape),
        rng.choice(grid, shape) * rng.choice([-1, 1], shape),
        rng.choice([1, 3], shape),
        1 + rng.standard_normal(shape) * 1e-6,
        rng.standard_normal(shape) * (rng.random(shape) < 0.05),
    )
    slots = np.arange(shape[0], dtype=np.int32)
    for rows in kinds:
        for largest in (0, 20):
            scaled = np.ldexp(rows, rng.integers(largest - 20, largest, (*shape[:2], 1))).astype(np.float32)
            pages, _ = written_pages(spec, slots, mx.array(scaled), mx.array(-scaled))
            np.testing.assert_array_equal(pages, expected_pages(spec, slots, scaled, -scaled))


@pytest.mark.parametrize(
    ("k_format", "v_format"), [("bf16", "fp4"), ("fp4", "fp16"), ("fp16", "bf16"), ("int8", "int4")]
)
def test_k_and_v_have_formats_and_dimensions_of_their_own(k_format: str, v_format: str) -> None:
    spec = make_spec(k_format, v_format, dim=64, value_dim=40, page_size=8)
    slots = np.arange(5, 60, dtype=np.int32)
    keys, values = hard_rows(55, 2, 64, 5), hard_rows(55, 2, 40, 6)
    pages, _ = written_pages(spec, slots, mx.array(keys), mx.array(values))
    np.testing.assert_array_equal(pages, expected_pages(spec, slots, keys, values))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS_WITH_KERNELS)
def test_16_bit_rows_are_stored_as_the_floats_they_are(name: str, dtype: mx.Dtype) -> None:
    spec = make_spec(name, name, dim=128, value_dim=128, page_size=16)
    slots = np.arange(64, dtype=np.int32)
    keys, values = (
        mx.array(np.clip(hard_rows(64, 2, 128, seed), -6e4, 6e4)).astype(dtype) for seed in (7, 8)
    )
    pages, _ = written_pages(spec, slots, keys, values)
    wide = [np.array(rows.astype(mx.float32)) for rows in (keys, values)]
    np.testing.assert_array_equal(pages, expected_pages(spec, slots, *wide))


def test_rows_need_not_be_contiguous() -> None:
    spec = make_spec("fp4", "bf16", dim=64, value_dim=64, page_size=16)
    slots = np.arange(20, dtype=np.int32)
    packed = mx.array(hard_rows(20, 5, 64, 9))
    keys, values = packed[:, 1:3], packed.transpose(1, 0, 2)[3:5].transpose(1, 0, 2)
    pages, _ = written_pages(spec, slots, keys, values)
    np.testing.assert_array_equal(
        pages, expected_pages(spec, slots, np.array(packed)[:, 1:3], np.array(packed)[:, 3:5])
    )
    columns = mx.array(np.ascontiguousarray(np.array(packed)[:, 1:3].transpose(2, 0, 1))).transpose(1, 2, 0)
    np.testing.assert_array_equal(written_pages(spec, slots, columns, values)[0], pages)


@at_every_level
def test_every_instruction_set_writes_the_same_bytes(level: str) -> None:
    assert run_at_level(level, "import cpu_pages; print(cpu_pages.digest())").strip() == digest()


def test_a_step_writes_in_place_and_only_its_own_slots() -> None:
    spec = make_spec("fp4", "fp4", dim=64, value_dim=64, page_size=8)
    pool = CpuPool(spec)
    address = np.asarray(pool._layers[0]).ctypes.data
    assert address % 64 == 0
    before = np.array(pool._layers[0])
    for slot in (3, 70, 8):
        pool.begin_step(write_step(np.array([slot], np.int32), 8))
        row = mx.array(hard_rows(1, 2, 64, slot))
        pool.write(0, row, row)
        mx.eval(pool.pending())
    after = np.asarray(pool._layers[0])
    assert after.ctypes.data == address
    touched = np.flatnonzero((after != before).any(axis=(1, 2)))
    assert touched.tolist() == [0, 1, 8]


def test_pool_bytes_are_the_planner_s() -> None:
    layers = tuple(LayerSpec(num_kv_heads=h, head_dim=d, value_dim=d) for h, d in ((2, 64), (3, 128)))
    spec = PoolSpec(layers=layers, num_pages=5, page_size=32, k_format="fp4", v_format="fp16")
    assert CpuPool(spec).nbytes == 5 * spec.page_bytes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1, 16, "bf16", 64, "bf16", 64), "num_pages"),
        ((4, 0, 16, "bf16", 64, "bf16", 64), "num_heads"),
        ((4, 1, 24, "bf16", 64, "bf16", 64), "page_size.*24"),
        ((4, 1, 16, "int5", 64, "bf16", 64), "int5"),
        ((4, 1, 16, "bf16", 64, "fp4", 60), "V rows.*60"),
        ((4, 1, 16, "bf16", 4096, "bf16", 64), "4096"),
    ],
)
def test_layouts_the_kernels_lack_are_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _ext.page_layout(*arguments)  # type: ignore[arg-type]


def test_wrong_rows_are_refused_by_name_and_shape() -> None:
    pool = CpuPool(make_spec("bf16", "bf16", dim=64, value_dim=32, page_size=16))
    pool.begin_step(write_step(np.arange(3, dtype=np.int32), 16))
    good_keys, good_values = mx.zeros((3, 2, 64)), mx.zeros((3, 2, 32))
    for keys, values, words in (
        (mx.zeros((3, 1, 64)), good_values, r"keys.*\[3, 1, 64\]"),
        (good_keys, good_keys, r"values.*\[3, 2, 64\]"),
        (mx.zeros((4, 2, 64)), mx.zeros((4, 2, 32)), r"slots.*\[4\]"),
        (mx.zeros((3, 2, 64), mx.int32), good_values, "keys.*float"),
    ):
        with pytest.raises(ValueError, match=words):
            pool.write(0, keys, values)
    for queries in (mx.zeros((3, 3, 64)), mx.zeros((3, 2, 32)), mx.zeros((2, 2, 64))):
        with pytest.raises(ValueError, match="queries"):
            pool.attend(0, queries, AttendOptions(scale=1.0))
    with pytest.raises(ValueError, match="sinks"):
        pool.attend(0, mx.zeros((3, 2, 64)), AttendOptions(scale=1.0, sinks=mx.zeros(3)))
    with pytest.raises(ValueError, match="got 9"):
        pool.copy_pages([(0, 9)])
    pool.write(0, good_keys, good_values)
    mx.eval(pool.attend(0, mx.zeros((3, 2, 64)), AttendOptions(scale=1.0)), *pool.pending())


def test_a_large_pool_is_zeros() -> None:
    pool = _ext.create_pool(_ext.page_layout(256, 8, 32, "bf16", 128, "bf16", 128))
    assert pool.nbytes == 2 * 256 * 8 * 32 * 256
    assert not np.asarray(pool).any()
