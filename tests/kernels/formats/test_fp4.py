from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from format_rows import TIES, tricky_rows
from octavo.kernels import page_format
from octavo.kernels.formats.e2m1 import MAGNITUDES
from octavo.kernels.formats.fp4 import SCALE_FACTORS
from octavo.kernels.formats.packing import unpack

FP4 = page_format("fp4")
HEAD_DIMS = (8, 32, 40, 64, 96, 128, 256)


def relative_rms(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    difference = got.astype(np.float64) - want
    return float(np.sqrt((difference**2).sum() / (want.astype(np.float64) ** 2).sum()))


def test_all_sixteen_codes_are_e2m1() -> None:
    codes = np.array([[0x76543210, 0xFEDCBA98]], np.uint32)  # element 0 in the low nibble
    values = FP4.dequantize(codes, np.array([[1]], np.float16))[0]
    want = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(values, want)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(want))
    np.testing.assert_array_equal(values[:8], MAGNITUDES)


def test_the_factors_are_the_documented_bits() -> None:
    assert [hex(bits) for bits in SCALE_FACTORS.view(np.uint32)] == [
        "0x3e2aaaab",
        "0x3e206d3a",
        "0x3e162fc9",
        "0x3e3851ec",
        "0x3e681b4f",
    ]


def test_ties_go_to_the_even_code() -> None:
    anchor = np.full(114, 6, np.float32)  # many sixes make scale 1 the best

    def codes_of(values: NDArray[np.float32]) -> list[int]:
        row = np.concatenate([values, -values, anchor])[None]
        codes, scales = FP4.quantize(row)
        assert scales.tolist() == [[1.0]]
        return [int(code) for code in unpack(codes, 4)[0, :14]]

    assert codes_of(TIES) == [0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14]
    below, above = np.nextafter(TIES, np.float32(0)), np.nextafter(TIES, np.float32(9))
    assert codes_of(below) == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14]
    assert codes_of(above) == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_codes_equal_ml_dtypes_at_the_chosen_scale(head_dim: int) -> None:
    for kind, rows in tricky_rows(head_dim).items():
        codes, scales = FP4.quantize(rows)
        used = scales[:, 0] > 0
        with np.errstate(under="ignore"):
            quotient = np.clip(rows[used] / scales[used].astype(np.float32), -6, 6)
        want = quotient.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        np.testing.assert_array_equal(unpack(codes[used], 4), want, err_msg=kind)
        assert not codes[~used].any(), kind


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_scale_is_the_best_of_the_candidates(head_dim: int) -> None:
    for kind in ("gauss", "outlier", "ties", "constant", "one element"):
        rows = tricky_rows(head_dim)[kind]
        _, scales = FP4.quantize(rows)
        exact = np.abs(rows).max(-1, keepdims=True) * SCALE_FACTORS
        candidates = exact.astype(np.float16).astype(np.float64)
        errors = []
        for column in candidates.T:
            with np.errstate(divide="ignore", invalid="ignore"):
                quotient = np.clip(np.nan_to_num(np.abs(rows) / column[:, None]), 0, 6)
            nearest = quotient.astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * column[:, None]
            errors.append(((np.abs(rows) - nearest) ** 2).sum(-1))
        chosen = (candidates == scales.astype(np.float64)).argmax(-1)
        chosen_error = np.take_along_axis(np.array(errors).T, chosen[:, None], 1)[:, 0]
        assert (candidates == scales.astype(np.float64)).any(-1).all(), kind
        # float32 may order two nearly equal errors differently
        assert (chosen_error <= np.min(errors, axis=0) * (1 + 1e-5) + 1e-30).all(), kind


def test_huge_rows_saturate_and_stay_finite() -> None:
    limit = 6 * 65504.0
    row = np.array([[3e38, -3e38, limit, limit / 2, 65504.0, -1e6, 1.0, 0.0]], np.float32)
    codes, scales = FP4.quantize(row)
    assert scales.tolist() == [[65504.0]]
    back = FP4.dequantize(codes, scales)[0].tolist()
    assert back == [limit, -limit, limit, limit / 2, 65504.0, -limit, 0.0, 0.0]


def test_a_rotation_that_overflows_is_not_stored() -> None:
    codes, scales, storable = FP4.store(np.full((1, 64), 3e38, np.float32))
    assert not storable.any()
    assert not codes.any()
    assert not scales.any()


@pytest.mark.parametrize("head_dim", [1, 4, 12, 63, 100, 0])
def test_odd_sizes_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 8 values, got head_dim {head_dim}"):
        FP4.quantize(np.ones((2, head_dim), np.float32))
    with pytest.raises(ValueError, match="multiple of 8"):
        FP4.row_bytes(head_dim)


@pytest.mark.parametrize(("head_dim", "limit"), [(64, 0.099), (128, 0.104), (256, 0.109)])
def test_the_error_on_gaussian_rows_is_the_documented_one(head_dim: int, limit: float) -> None:
    rows = np.random.default_rng(7).standard_normal((2000, head_dim)).astype(np.float32)
    assert relative_rms(FP4.dequantize(*FP4.quantize(rows)), rows) < limit


@pytest.mark.parametrize("factor", [8, 30])
def test_rotation_holds_outlier_channels_at_the_gaussian_error(factor: int) -> None:
    rng = np.random.default_rng(8)
    rows = rng.standard_normal((2000, 128)).astype(np.float32)
    rows[:, rng.choice(128, 4, replace=False)] *= factor
    rotated = relative_rms(FP4.restore(*FP4.store(rows)[:2]), rows)
    assert rotated < 0.104
    assert relative_rms(FP4.dequantize(*FP4.quantize(rows)), rows) > 1.25 * rotated
