from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from format_rows import formats_and_dims, tricky_rows
from octavo.kernels import page_format
from octavo.kernels.formats.affine import AFFINE4, AFFINE8
from octavo.kernels.formats.integer import INT4, INT8
from octavo.kernels.formats.packing import pack, unpack

INTEGERS = (INT8(), INT4())
AFFINES = (AFFINE8(), AFFINE4())
INTEGER_DIMS = [pair for pair in formats_and_dims(8, 40, 64, 96, 128) if pair[0] in ("int8", "int4")]


@pytest.fixture(params=INTEGERS, ids=lambda fmt: fmt.name)
def fmt(request: pytest.FixtureRequest) -> INT8 | INT4:
    chosen: INT8 | INT4 = request.param
    return chosen


@pytest.fixture(params=AFFINES, ids=lambda fmt: fmt.name)
def affine(request: pytest.FixtureRequest) -> AFFINE8 | AFFINE4:
    chosen: AFFINE8 | AFFINE4 = request.param
    return chosen


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_puts_element_0_lowest(bits: int) -> None:
    codes = np.arange(64, dtype=np.uint8)[None] & np.uint8((1 << bits) - 1)
    words = pack(codes, bits)
    assert words.shape == (1, 64 * bits // 32)
    np.testing.assert_array_equal(unpack(words, bits), codes)
    assert words[0, 0] == {4: 0x76543210, 8: 0x03020100}[bits]


def test_every_code_is_its_twos_complement(fmt: INT8 | INT4) -> None:
    codes = np.arange(1 << fmt.code_bits, dtype=np.uint8)[None]
    values = fmt.dequantize(pack(codes, fmt.code_bits), np.array([[0.5]], np.float16))[0]
    half = 1 << (fmt.code_bits - 1)
    np.testing.assert_array_equal(values, [(c - 2 * half if c >= half else c) * 0.5 for c in range(2 * half)])


@pytest.mark.parametrize(("name", "head_dim"), INTEGER_DIMS)
def test_codes_are_the_nearest_integers(name: str, head_dim: int) -> None:
    fmt = page_format(name)
    assert isinstance(fmt, INT8 | INT4)
    for kind, rows in tricky_rows(head_dim).items():
        codes, scales = fmt.quantize(rows)
        with np.errstate(over="ignore", under="ignore"):
            exact = np.abs(rows).max(-1, keepdims=True) * np.float32(1 / fmt.highest)
            want_scales = np.minimum(exact, 65504).astype(np.float16)
        np.testing.assert_array_equal(scales, want_scales, err_msg=kind)
        used = scales[:, 0] > 0
        quotient = rows[used].astype(np.float64) / scales[used].astype(np.float64)
        want = np.clip(np.rint(quotient), fmt.lowest, fmt.highest).astype(np.int64) & (1 << fmt.code_bits) - 1
        np.testing.assert_array_equal(unpack(codes[used], fmt.code_bits), want, err_msg=kind)
        assert not codes[~used].any(), kind


def test_ties_go_to_the_even_integer(fmt: INT8 | INT4) -> None:
    row = np.zeros((1, 64), np.float32)
    row[0, 0] = fmt.highest  # makes the scale 1
    halves = np.arange(0.5, 6, dtype=np.float32)
    row[0, 1:7], row[0, 7:13] = halves, -halves
    codes, scales = fmt.quantize(row)
    assert scales.tolist() == [[1.0]]
    values = fmt.dequantize(codes, scales)[0]
    assert values[1:13].tolist() == [0, 2, 2, 4, 4, 6, 0, -2, -2, -4, -4, -6]
    above = np.nextafter(row, np.float32(99), dtype=np.float32)
    above[0, 0] = fmt.highest
    assert fmt.dequantize(*fmt.quantize(above))[0, 1:7].tolist() == [1, 2, 3, 4, 5, 6]


def test_tiny_scales_may_give_the_most_negative_code() -> None:
    row = np.zeros((1, 8), np.float32)
    row[0, :2] = [-1.4 * 7 * 2.0**-24, 1.4 * 7 * 2.0**-24]
    codes, scales = INT4().quantize(row)
    assert unpack(codes, 4)[0, :2].tolist() == [8, 7]
    assert scales.tolist() == [[2.0**-24]]


@pytest.mark.parametrize(("name", "multiple"), [("int8", 4), ("int4", 8), ("affine8", 64), ("affine4", 64)])
def test_rows_that_do_not_fill_words_or_groups_are_refused(name: str, multiple: int) -> None:
    for head_dim in (0, multiple - 2, multiple + 2, 3 * multiple // 2 + 1):
        with pytest.raises(ValueError, match=f"{name} packs rows of a multiple of {multiple}.*{head_dim}"):
            page_format(name).quantize(np.ones((2, head_dim), np.float32))


def test_affine_bits_are_those_of_mlx(affine: AFFINE8 | AFFINE4) -> None:
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((3000, 128)) * np.exp2(rng.integers(-8, 8, (3000, 1)))
    rows[:500] += rng.standard_normal((500, 1)) * 20
    rows = rows.astype(np.float16)
    rows[0], rows[1], rows[2], rows[3] = 0, 1.5, -0.25, 0
    rows[3, 4], rows[3, 100] = 1, -1
    codes, scales = affine.quantize(rows.astype(np.float32))
    theirs = [np.array(part) for part in mx.quantize(mx.array(rows), group_size=64, bits=affine.code_bits)]
    np.testing.assert_array_equal(codes, theirs[0])
    np.testing.assert_array_equal(scales[:, ::2], theirs[1])
    np.testing.assert_array_equal(scales[:, 1::2], theirs[2])
    step, bias = (mx.array(part).astype(mx.float32) for part in theirs[1:])
    back = mx.dequantize(mx.array(codes), step, bias, group_size=64, bits=affine.code_bits)
    np.testing.assert_allclose(affine.dequantize(codes, scales), np.array(back), rtol=0, atol=1e-4)


def test_affine_ends_are_exact_and_errors_are_below_a_step(affine: AFFINE8 | AFFINE4) -> None:
    rows = np.random.default_rng(6).uniform(-3, 5, (500, 64)).astype(np.float32)
    codes, scales = affine.quantize(rows)
    back = affine.dequantize(codes, scales)
    step = np.abs(scales[:, :1].astype(np.float32))
    rounding = np.abs(rows).max() * 2.0**-11 + step * (1 << affine.code_bits) * 2.0**-11
    assert (np.abs(back - rows) <= step + rounding).all(), (
        "zero has a code, so the far end may lie a step off"
    )
    ends = np.abs(rows).argmax(-1)
    at = np.arange(len(rows))
    np.testing.assert_array_equal(back[at, ends], rows[at, ends].astype(np.float16).astype(np.float32))


def test_affine_rows_beyond_fp16_are_refused(affine: AFFINE8 | AFFINE4) -> None:
    rows = np.ones((3, 64), np.float32)
    rows[1, 3], rows[2, 3] = 7e4, 3e38
    rows[2, 4] = -3e38
    with pytest.raises(ValueError, match=r"row \(1,\) holds 70000"):
        affine.quantize(rows)
    codes, scales, storable = affine.store(rows)
    assert storable.tolist() == [True, False, False]
    assert not codes[1:].any()
    assert not scales[1:].any()
