from __future__ import annotations

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from format_rows import TIES, formats_and_dims, tricky_rows
from octavo.kernels import page_format
from octavo.kernels.formats.microscaling import MXFP4, NVFP4
from octavo.kernels.formats.packing import unpack

FORMATS = (MXFP4(), NVFP4())
SCALE_TYPES = {"mxfp4": ml_dtypes.float8_e8m0fnu, "nvfp4": ml_dtypes.float8_e4m3fn}
DIMS = [(name, dim) for name, dim in formats_and_dims(32, 64, 96, 128, 256) if name in SCALE_TYPES]


@pytest.fixture(params=FORMATS, ids=lambda fmt: fmt.name)
def fmt(request: pytest.FixtureRequest) -> MXFP4 | NVFP4:
    chosen: MXFP4 | NVFP4 = request.param
    return chosen


def test_every_scale_byte_has_the_value_of_its_type(fmt: MXFP4 | NVFP4) -> None:
    scales = np.arange(256, dtype=np.uint8)
    want = scales.view(SCALE_TYPES[fmt.name]).astype(np.float32)
    positive = scales if fmt.name == "mxfp4" else scales[:128]  # E4M3's sign is never stored
    np.testing.assert_array_equal(fmt.scale_values(positive), want[: len(positive)])


def test_all_sixteen_codes_at_every_scale(fmt: MXFP4 | NVFP4) -> None:
    scales = np.arange(255 if fmt.name == "mxfp4" else 127, dtype=np.uint8)[:, None]
    words = [0x76543210, 0xFEDCBA98] * (fmt.multiple // 16)
    codes = np.broadcast_to(np.array(words, np.uint32), (len(scales), len(words)))
    values = fmt.dequantize(codes, scales)
    with np.errstate(over="ignore", under="ignore"):
        want = unpack(codes, 4).view(ml_dtypes.float4_e2m1fn).astype(np.float64) * fmt.scale_values(scales)
        np.testing.assert_array_equal(values, want.astype(np.float32))
    finite = np.isfinite(values).all(-1)
    assert finite.sum() == len(scales) - (2 if fmt.name == "mxfp4" else 0), "6 * 2^126 is no float32"
    again = fmt.dequantize(*fmt.quantize(values[finite]))
    np.testing.assert_array_equal(again, values[finite])


@pytest.mark.parametrize(("name", "dim"), DIMS)
def test_codes_equal_ml_dtypes_at_the_stored_scale(name: str, dim: int) -> None:
    fmt = page_format(name)
    assert isinstance(fmt, MXFP4 | NVFP4)
    for kind, rows in tricky_rows(dim).items():
        codes, scales = fmt.quantize(rows)
        used = np.repeat(fmt.scale_values(scales), fmt.multiple, -1).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore", under="ignore"):
            quotient = np.clip(np.where(used > 0, rows / used, 0.0), -6, 6)
        want = quotient.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        got = unpack(codes, 4)
        np.testing.assert_array_equal(got[used > 0], want[used > 0], err_msg=kind)
        assert not got[used == 0].any(), kind


def test_e8m0_scales_are_the_smallest_that_do_not_saturate() -> None:
    fmt, rng = MXFP4(), np.random.default_rng(1)
    absmax = np.exp2(rng.uniform(-149, 127.5, 20000)).astype(np.float32)
    powers = np.exp2(np.arange(-149, 128, dtype=np.float64))
    edges = np.concatenate([powers, 1.5 * powers[1:]]).astype(np.float32)
    absmax = np.concatenate([absmax, edges, np.nextafter(edges, np.float32(1))])
    rows = np.zeros((len(absmax), 32), np.float32)
    rows[:, 7] = absmax
    scales = fmt.quantize(rows)[1][:, 0].astype(np.int64)
    with np.errstate(under="ignore"):
        fits = absmax <= 6 * np.exp2(scales - 127.0)
        tight = (scales == 0) | (absmax > 6 * np.exp2(scales - 128.0))
    assert fits.all()
    assert tight.all()
    assert (scales.min(), scales.max()) == (0, 252)


def test_e4m3_scales_are_correctly_rounded() -> None:
    fmt = NVFP4()
    stored = np.arange(127, dtype=np.uint8)
    values = stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (values[:-1] + values[1:]) / 2 * 6
    rng = np.random.default_rng(2)
    absmax = np.concatenate(
        [
            *(ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e4)), values * 6),
            np.exp2(rng.uniform(-12, 11.3, 20000)).astype(np.float32),
        ]
    ).astype(np.float32)
    rows = np.zeros((len(absmax), 16), np.float32)
    rows[:, 3] = -absmax
    exact = np.minimum(absmax.astype(np.float64) / 6, 448)
    want = exact.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(fmt.quantize(rows)[1][:, 0], want)


def test_e4m3_scales_saturate_and_vanish() -> None:
    rows = np.zeros((3, 16), np.float32)
    rows[:, 5] = [1e30, -6 * 2.0**-10, np.nextafter(np.float32(6 * 2.0**-10), np.float32(1))]
    codes, scales = NVFP4().quantize(rows)
    assert scales[:, 0].tolist() == [126, 0, 1]
    assert not codes[1].any()
    assert NVFP4().dequantize(codes, scales)[:, 5].tolist() == [448.0 * 6, 0.0, 3 * 2.0**-9]


@pytest.mark.parametrize(("name", "multiple"), [("mxfp4", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("head_dim", [0, 8, 40, 100])
def test_rows_that_are_no_whole_groups_are_refused(name: str, multiple: int, head_dim: int) -> None:
    fmt = page_format(name)
    with pytest.raises(ValueError, match=f"{name} packs rows of a multiple of {multiple}.*{head_dim}"):
        fmt.quantize(np.ones((2, head_dim), np.float32))
    with pytest.raises(ValueError, match=f"multiple of {multiple}"):
        fmt.row_bytes(head_dim)


def test_bits_are_those_of_mlx(fmt: MXFP4 | NVFP4) -> None:
    """Ties and negative zeros are excluded, because MLX's CPU and Metal kernels differ there."""
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((5000, 128)).astype(np.float32)
    rows *= np.exp2(rng.integers(-7, 9, (5000, 1))).astype(np.float32)
    rows[:20] = 1.25 * np.sign(rows[:20])
    codes, scales = fmt.quantize(rows)
    theirs = [np.array(part) for part in mx.quantize(mx.array(rows), mode=fmt.name)]
    np.testing.assert_array_equal(scales, theirs[1])
    np.testing.assert_array_equal(_without_negative_zeros(codes), _without_negative_zeros(theirs[0]))
    back = mx.dequantize(
        mx.array(codes), mx.array(scales), mode=fmt.name, group_size=fmt.multiple, dtype=mx.float32
    )
    np.testing.assert_array_equal(np.array(back), fmt.dequantize(codes, scales))


def test_ties_go_to_the_even_code(fmt: MXFP4 | NVFP4) -> None:
    row = np.zeros((1, 32), np.float32)
    row[0, :7], row[0, 7] = TIES, 6
    row[0, 16:23], row[0, 23] = -TIES, 6
    codes = unpack(fmt.quantize(row)[0], 4)[0]
    assert codes[:8].tolist() == [0, 2, 2, 4, 4, 6, 6, 7]
    assert codes[16:23].tolist() == [8, 10, 10, 12, 12, 14, 14]


def _without_negative_zeros(codes: NDArray[np.uint32]) -> NDArray[np.uint8]:
    nibbles = unpack(codes, 4)
    return np.where(nibbles == 8, np.uint8(0), nibbles)
