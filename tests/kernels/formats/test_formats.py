from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from format_rows import formats_and_dims, tricky_rows
from octavo.kernels import FORMAT_NAMES, FORMATS_WITH_KERNELS, PageFormat, page_format
from octavo.kernels.formats import hadamard
from octavo.kernels.verify.oracle import hadamard64

ROW_BYTES = {
    "bf16": 256, "fp16": 256, "int8": 130, "int4": 66, "fp4": 66, "fp5": 80, "mxfp4": 68,
    "nvfp4": 72, "affine8": 136, "affine4": 72,
}  # fmt: skip
HALF_DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}


@pytest.fixture(params=FORMAT_NAMES)
def fmt(request: pytest.FixtureRequest) -> PageFormat:
    return page_format(request.param)


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        ValueError, match="'fp3' is not known; use one of bf16, fp16, int8, int4, fp4, fp5, mxfp4"
    ):
        page_format("fp3")


def test_a_format_knows_its_name_and_size(fmt: PageFormat) -> None:
    codes, scales = fmt.quantize(np.ones((3, 5, 128), np.float32))
    if fmt.name in FORMATS_WITH_KERNELS:
        assert fmt.row_bytes(128) == ROW_BYTES[fmt.name]
    assert codes.nbytes + scales.nbytes == 15 * fmt.row_bytes(128)
    assert codes.shape == (3, 5, fmt.codes_per_row(128))
    assert scales.shape == (3, 5, fmt.scales_per_row(128))
    assert fmt.page_bytes(128, page_size=32, num_kv_heads=8) == 32 * 8 * fmt.row_bytes(128)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantize_refuses_nonfinite_values(fmt: PageFormat, bad: float) -> None:
    rows = np.ones((2, 3, 64), np.float32)
    rows[1, 2, 7] = bad
    with pytest.raises(ValueError, match=rf"row \(1, 2\) holds {bad}.*{fmt.name}"):
        fmt.quantize(rows)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "head_dim"), formats_and_dims(40, 64, 96, 192))
def test_store_writes_zeros_for_nonfinite_rows(name: str, bad: float, head_dim: int) -> None:
    fmt = page_format(name)
    rows = np.random.default_rng(0).standard_normal((4, head_dim)).astype(np.float32)
    clean_codes, clean_scales, _ = fmt.store(rows)
    rows[2, head_dim - 1] = bad
    codes, scales, storable = fmt.store(rows)
    assert storable.tolist() == [True, True, False, True]
    assert not codes[2].any()
    assert not scales[2].any()
    np.testing.assert_array_equal(codes[storable], clean_codes[storable])
    np.testing.assert_array_equal(scales[storable], clean_scales[storable])


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_rows_of_other_float_types_are_converted(fmt: PageFormat, dtype: type[np.generic]) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 64)).astype(dtype)
    for got, want in zip(fmt.quantize(rows), fmt.quantize(rows.astype(np.float32)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_codes_and_scales_must_belong_together(fmt: PageFormat) -> None:
    codes, scales = fmt.quantize(np.ones((2, 64), np.float32))
    with pytest.raises(ValueError, match=fmt.name):
        fmt.dequantize(codes, scales[:1])
    with pytest.raises(ValueError, match=fmt.name):
        fmt.dequantize(codes.astype(np.int64), scales)


@pytest.mark.parametrize("name", HALF_DTYPES)
def test_16_bit_codes_are_the_correctly_rounded_values(name: str) -> None:
    fmt, dtype = page_format(name), HALF_DTYPES[name]
    for kind, rows in tricky_rows(64).items():
        with np.errstate(over="ignore", under="ignore"):
            want = rows.astype(dtype)
        codes, _, storable = fmt.encode(rows)
        finite = np.isfinite(want.astype(np.float32)).all(-1)
        np.testing.assert_array_equal(storable, finite, err_msg=kind)
        np.testing.assert_array_equal(codes[finite], want.view(np.uint16)[finite], err_msg=kind)


@pytest.mark.parametrize("name", HALF_DTYPES)
def test_every_finite_16_bit_value_survives(name: str) -> None:
    fmt, dtype = page_format(name), HALF_DTYPES[name]
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(dtype).astype(np.float32)
    finite = np.isfinite(values)
    codes, scales, storable = fmt.encode(values[:, None])
    np.testing.assert_array_equal(storable, finite)
    np.testing.assert_array_equal(codes[finite, 0], bits[finite])
    np.testing.assert_array_equal(fmt.dequantize(codes, scales)[finite, 0], values[finite])


@pytest.mark.parametrize(("name", "limit"), [("fp16", 65504.0), ("bf16", 3.3895313892515355e38)])
def test_a_value_beyond_the_range_is_refused(name: str, limit: float) -> None:
    fmt = page_format(name)
    fmt.quantize([[limit, -limit]])
    with pytest.raises(ValueError, match="finite"):
        fmt.quantize([[1.0, limit * 1.003]])


@pytest.mark.parametrize("head_dim", [1, 2, 8, 40, 64, 80, 96, 112, 128, 192, 256])
def test_the_rotation_is_orthonormal_and_its_own_inverse(head_dim: int) -> None:
    rows = np.random.default_rng(1).standard_normal((50, head_dim)).astype(np.float32)
    rotated = hadamard(rows)
    np.testing.assert_allclose(rotated, hadamard64(rows), atol=3e-6)
    np.testing.assert_allclose(hadamard(rotated), rows, atol=3e-6)
    np.testing.assert_allclose((rotated**2).sum(-1), (rows**2).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 192])
def test_rotated_queries_and_keys_have_the_same_products(head_dim: int) -> None:
    rng = np.random.default_rng(2)
    queries, keys = (rng.standard_normal((20, head_dim)).astype(np.float32) for _ in range(2))
    got = hadamard(queries).astype(np.float64) @ hadamard(keys).T.astype(np.float64)
    np.testing.assert_allclose(got, queries.astype(np.float64) @ keys.T.astype(np.float64), atol=2e-5)


def test_formats_import_without_mlx() -> None:
    code = "import sys, octavo.kernels, octavo.kernels.verify.oracle; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
