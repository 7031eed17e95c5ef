from __future__ import annotations

from collections.abc import Iterator

from native import at_every_level, require_extension, run_at_level

require_extension()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from attend_once import attend_once  # noqa: E402
from attention_backends import poison  # noqa: E402
from attention_cases import (  # noqa: E402
    EVERY_FORMAT_PAIR,
    FORMAT_PAIRS,
    Case,
    Extras,
    as_numpy,
    build_metadata,
    shuffled_tables,
)
from octavo.kernels.cpu.backend import CpuBackend, CpuPool  # noqa: E402
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec  # noqa: E402
from octavo.kernels.verify.oracle import OraclePool  # noqa: E402

pytestmark = pytest.mark.parity

# Relative to the largest output. 16-bit rows are rounded on output; bf16 rows also have rounded softmax
# weights.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 2e-3, mx.bfloat16: 1e-2}

# With these page formats, 16-bit rows may be computed in 8-bit fixed point.
BYTES = {"fp4", "fp5", "int4"}
BYTES_TOLERANCE = 2e-2


def tolerance(formats: tuple[str, str], dtype: mx.Dtype) -> float:
    rounds = dtype != mx.float32 and not BYTES.isdisjoint(formats)
    return BYTES_TOLERANCE if rounds else TOLERANCE[dtype]


LONG = (
    Case(name="splits", sequences=((3000, 1), (1023, 1), (1024, 1), (1100, 2)), page_size=32),
    Case(name="splits-chunk", sequences=((1500, 70), (2100, 3)), page_size=64, group=1),
    Case(name="splits-dim128", sequences=((2100, 1), (40, 1)), page_size=16, head_dim=128, group=4),
    Case(name="splits-page8", sequences=((1300, 1),), page_size=8, head_dim=40),
    Case(name="window", sequences=((2500, 1), (1300, 30)), page_size=32, window=1200, keep=70),
    Case(
        name="window-sinks",
        sequences=((2500, 1), (3, 1)),
        page_size=16,
        window=300,
        keep=4,
        sinks=True,
        softcap=6.0,
    ),
    Case(name="masked", sequences=((2500, 1), (700, 40)), page_size=32, mask="added"),
    Case(name="many", sequences=tuple((17 * i % 90, 1 + i % 3) for i in range(40)), page_size=16),
)


def rows_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return Gaussian rows with one channel eight times as large."""
    rows = rng.standard_normal(shape).astype(np.float32)
    rows[..., 3] *= 8
    return mx.array(rows).astype(dtype)


def last_step_error(case: Case, formats: tuple[str, str], dtype: mx.Dtype, *, exact: bool = False) -> float:
    spec, rng = case.spec(*formats), np.random.default_rng(0)
    pool, truth = CpuBackend(exact=exact).create_pool(spec), OraclePool(spec).layers[0]
    poison(pool)
    tables = shuffled_tables(case, rng, spec.num_pages)
    for sequences in ([(0, old) for old, _ in case.sequences], case.sequences):
        metadata = build_metadata(sequences, tables, case.page_size)
        tokens = metadata.num_tokens
        keys = rows_of(rng, (tokens, case.kv_heads, case.head_dim), dtype)
        values = rows_of(rng, (tokens, case.kv_heads, case.layer.value_dim), dtype)
        pool.begin_step(metadata)
        pool.write(0, keys, values)
        mx.eval(pool.pending())
        truth.write(metadata, as_numpy(keys), as_numpy(values))
    queries = rows_of(rng, (tokens, case.kv_heads * case.group, case.head_dim), dtype)
    extras = Extras.of(case, rng, metadata)
    out = pool.attend(0, queries, AttendOptions(scale=0.1, **extras.arrays()))
    want = truth.attend(metadata, as_numpy(queries), scale=0.1, **extras.truth())
    return float(np.abs(as_numpy(out) - want).max() / np.abs(want).max())


def _long_grid() -> Iterator[object]:
    """Yield each case with each pair of ``FORMAT_PAIRS``, every third with the others, in rotating types."""
    types = tuple(TOLERANCE)
    for number, formats in enumerate(EVERY_FORMAT_PAIR):
        cases = [case for case in LONG if case.fits(*formats)]
        for index, case in enumerate(cases if formats in FORMAT_PAIRS else cases[number % 3 :: 3]):
            dtype = types[(index + number) % 3]
            yield pytest.param(case, formats, dtype, id=f"{case.name}-{'-'.join(formats)}-{dtype}")


@pytest.mark.parametrize(("case", "formats", "dtype"), list(_long_grid()))
def test_long_contexts_equal_truth(case: Case, formats: tuple[str, str], dtype: mx.Dtype) -> None:
    assert last_step_error(case, formats, dtype) < tolerance(formats, dtype)


@pytest.mark.parametrize(
    ("formats", "dtype"),
    [
        (("fp4", "fp4"), mx.bfloat16),
        (("fp5", "int4"), mx.float16),
        (("bf16", "fp5"), mx.float16),
        (("mxfp4", "nvfp4"), mx.bfloat16),
        (("affine4", "affine4"), mx.float16),
    ],
)
def test_exact_attention_keeps_16_bit_precision(formats: tuple[str, str], dtype: mx.Dtype) -> None:
    for case in (LONG[1], LONG[2], LONG[5]):
        assert last_step_error(case, formats, dtype, exact=True) < TOLERANCE[dtype]


@pytest.mark.parametrize("formats", [("int8", "int8"), ("affine8", "affine8")], ids="-".join)
def test_int8_attention_keeps_16_bit_precision(formats: tuple[str, str]) -> None:
    for case in (LONG[1], LONG[2], LONG[5]):
        assert last_step_error(case, formats, mx.float16) < TOLERANCE[mx.float16]


@pytest.mark.parametrize("name", sorted(BYTES))
@pytest.mark.parametrize("scale", [0.01, 0.1, 0.3], ids=["flat", "usual", "peaked"])
def test_rounding_to_bytes_is_small_beside_the_error_of_the_pages(name: str, scale: float) -> None:
    rng = np.random.default_rng(2)
    shapes = ((1, 8, 128), (1000, 2, 128), (1000, 2, 128))
    rows = tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    plain, exact, rounded = (
        attend_once("bf16", rows, scale=scale),
        attend_once(name, rows, exact=True, scale=scale),
        attend_once(name, rows, scale=scale),
    )
    of_pages, of_rounding = (np.sqrt(np.square(each - exact).mean()) for each in (plain, rounded))
    assert of_rounding < 0.3 * of_pages


@pytest.mark.parametrize("poison_value", [np.nan, np.inf])
def test_a_query_that_is_not_finite_gives_no_numbers_among_many_rows(poison_value: float) -> None:
    rng = np.random.default_rng(4)
    queries, keys = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 2, 64), (90, 2, 64)))
    queries[5, 1, 3] = poison_value
    got = attend_once("bf16", (queries, keys, keys))
    assert {(row, head) for row, head, _ in np.argwhere(~np.isfinite(got))} == {(5, 1)}


GROWING_AT_LEVEL = """
import mlx.core as mx
import numpy as np
from octavo.kernels.cpu.backend import CpuPool
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec
from attention_cases import build_metadata

# K of 16 bits: of keys that grow this much, codes would be far from what was written.
LENGTH, ROWS, DIM = 1900, 20, 64
for name in ("bf16", "fp4"):
    for growth in (0.5, 3, 7.9, 8.1, 30, -3, -30):
        layer = LayerSpec(num_kv_heads=1, head_dim=DIM, value_dim=DIM)
        spec = PoolSpec(layers=(layer,), num_pages=60, page_size=32, k_format="bf16", v_format=name)
        logits = mx.arange(LENGTH) * (growth / 64 * np.log(2))
        keys = mx.zeros((LENGTH, 1, DIM))
        keys[:, 0, 0] = logits
        keys = keys.astype(mx.bfloat16)
        values = mx.sin(mx.arange(LENGTH * DIM).reshape(LENGTH, 1, DIM)).astype(mx.bfloat16)
        queries = mx.zeros((ROWS, 1, DIM))
        queries[..., 0] = 1
        pool = CpuPool(spec, exact=True)
        pool.begin_step(build_metadata([(0, LENGTH)], [np.arange(60, dtype=np.int32)], 32))
        pool.write(0, keys, values)
        mx.eval(pool.pending())
        pool.begin_step(build_metadata([(LENGTH - ROWS, ROWS)], [np.arange(60, dtype=np.int32)], 32))
        out = pool.attend(0, queries.astype(mx.bfloat16), AttendOptions(scale=1.0))
        got = np.array(out.astype(mx.float32))
        held = np.array(values.astype(mx.float32))[:, 0].astype(np.float64)
        exact = np.array(keys.astype(mx.float32))[:, 0, 0].astype(np.float64)
        for row in range(ROWS):
            length = LENGTH - ROWS + row + 1
            weights = np.exp(exact[:length] - exact[:length].max())
            want = weights @ held[:length] / weights.sum()
            error = np.abs(got[row, 0] - want).max()
            assert error < (0.02 if name == "bf16" else 0.25), (name, growth, row, error)
"""


@at_every_level
def test_logits_that_grow_from_tile_to_tile(level: str) -> None:
    run_at_level(level, GROWING_AT_LEVEL)


@pytest.mark.parametrize("name", ["fp4", "fp5", "int4"])
@pytest.mark.parametrize("logit", [2.0, 5.5, 6.0, 7.0, 9.0])
def test_rounding_weights_to_bytes_loses_no_mass(name: str, logit: float) -> None:
    """One position outweighs all others, but the others together still change the output."""
    queries = np.zeros((1, 1, 64), np.float32)
    keys, values = np.zeros((32, 1, 64), np.float32), np.full((32, 1, 64), 2.0, np.float32)
    queries[..., 0], keys[0, :, 0], values[0] = 1, logit, -2
    got = float(attend_once(name, (queries, keys, values), scale=1.0).mean())
    want = float(attend_once(name, (queries, keys, values), exact=True, scale=1.0).mean())
    assert abs(got - want) < 0.04


@pytest.mark.parametrize("count", [1, 5, 40])
def test_fp16_rows_keep_the_bits_that_bf16_lacks(count: int) -> None:
    rng = np.random.default_rng(8)
    queries, keys = np.zeros((count, 1, 64), np.float32), np.zeros((160, 1, 64), np.float32)
    queries[..., 0], keys[:, 0, 0] = 1, 1 + rng.integers(0, 8, 160) / 1024
    values = np.tile(np.array([1, -1], np.float32)[:, None, None], (80, 1, 64))
    values += rng.integers(0, 8, values.shape) / 1024
    rows = (queries, keys, values)
    want = attend_once("fp16", rows, exact=True, scale=512.0, stored=mx.float16)
    got = attend_once("fp16", rows, scale=512.0, stored=mx.float16)
    assert np.abs(got - want).max() < 1e-2 * np.abs(want).max()


GRID_AT_LEVEL = """
import mlx.core as mx
from attention_backends import poison
from attention_cases import CASES, EVERY_FORMAT_PAIR, FORMAT_PAIRS, run_case
from octavo.kernels import _ext
from octavo.kernels.cpu.backend import CpuBackend
worst = dict.fromkeys(("float32", "bfloat16"), 0.0)
for index, case in enumerate(CASES[::3]):
    others = [pair for pair in EVERY_FORMAT_PAIR[len(FORMAT_PAIRS):] if case.fits(*pair)]
    for formats in (*FORMAT_PAIRS[index // 2 % 2 :: 2], *others[index % 10 :: 10]):
        dtype = (mx.float32, mx.bfloat16)[index % 2]
        pool = CpuBackend().create_pool(case.spec(*formats))
        poison(pool)
        name = str(dtype).rsplit(".", 1)[-1]
        worst[name] = max(worst[name], run_case(case, pool, dtype=dtype).error)
print(_ext.isa(), worst["float32"], worst["bfloat16"])
"""


@at_every_level
def test_every_instruction_set_equals_truth(level: str) -> None:
    name, wide, narrow = run_at_level(level, GRID_AT_LEVEL).split()
    assert name == level
    assert float(wide) < TOLERANCE[mx.float32]
    assert float(narrow) < BYTES_TOLERANCE


@at_every_level
def test_a_single_position_is_read_as_it_is_stored(level: str) -> None:
    code = "from cpu_pages import largest_reading_error; print(largest_reading_error())"
    error = float(run_at_level(level, code))
    if level in ("generic", "avx2"):
        assert error == 0
    else:
        assert error < 1e-4, "integers times weights in 16-bit fixed point"


@pytest.mark.parametrize("name", ["bf16", "fp4"])
def test_hundreds_of_steps_in_place_equal_truth(name: str) -> None:
    rng = np.random.default_rng(7)
    layer = LayerSpec(num_kv_heads=1, head_dim=32, value_dim=32)
    spec = PoolSpec(layers=(layer, layer), num_pages=6, page_size=16, k_format=name, v_format=name)
    pool, truth = CpuPool(spec), OraclePool(spec)
    lengths, tables = [0, 0], [rng.permutation(6)[:3].astype(np.int32) for _ in range(2)]
    tables[1] = np.setdiff1d(np.arange(6), tables[0]).astype(np.int32)
    for step in range(300):
        new = [int(rng.integers(1, 4)) for _ in lengths]
        if max(old + count for old, count in zip(lengths, new, strict=True)) > 48:
            lengths = [0, 0]
            tables.reverse()
        metadata = build_metadata(list(zip(lengths, new, strict=True)), tables, 16)
        rows = rng.standard_normal((2, 3, metadata.num_tokens, 1, 32)).astype(np.float32)
        pool.begin_step(metadata)
        outs = []
        for index, (q, k, v) in enumerate(rows):
            pool.write(index, mx.array(k), mx.array(v))
            outs.append(pool.attend(index, mx.array(q), AttendOptions(scale=0.2)))
        mx.eval(outs, pool.pending())
        for index, (q, k, v) in enumerate(rows):
            truth.layers[index].write(metadata, k, v)
            if step % 10 == 0 or step > 290:
                want = truth.layers[index].attend(metadata, q, scale=0.2)
                assert np.abs(as_numpy(outs[index]) - want).max() < 1e-3
        lengths = [old + count for old, count in zip(lengths, new, strict=True)]
