from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from format_rows import tricky_rows
from octavo.kernels import page_format
from octavo.kernels.formats.fp5 import EDGES, MAGNITUDES, SCALE_FACTOR, STEPS, scale_values
from octavo.kernels.formats.packing import unpack

FP5, FP4 = page_format("fp5"), page_format("fp4")
HEAD_DIMS = (8, 16, 40, 64, 96, 128, 256)
ANCHOR = np.full(104, 7, np.float32)  # many sevens make scale 1 the best
ONE = 120


def relative_rms(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    difference = got.astype(np.float64) - want
    return float(np.sqrt((difference**2).sum() / (want.astype(np.float64) ** 2).sum()))


def test_the_values_are_those_of_a_float_with_two_exponent_and_two_fraction_bits() -> None:
    want = [fraction / 4 * 2.0**max(exponent - 1, 0) for exponent in range(4)
            for fraction in (range(4) if exponent == 0 else range(4, 8))]  # fmt: skip
    assert MAGNITUDES.tolist() == want
    e2m1 = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(MAGNITUDES[::2], e2m1)


def test_a_row_is_read_as_documented() -> None:
    codes = np.array([[0x76543210, 0xFEDCBA98, 0x76543210]], np.uint32)
    planes = np.array([[ONE, 0b00000000, 0b10000001]], np.uint8)
    values = FP5.dequantize(codes, planes)[0]
    np.testing.assert_array_equal(values[:8], MAGNITUDES[::2])
    np.testing.assert_array_equal(values[8:16], -MAGNITUDES[::2])
    assert np.signbit(values[8])
    assert values[16:].tolist() == [0.25, 0.5, 1, 1.5, 2, 3, 4, 7]
    upper = FP4.dequantize(codes, np.array([[1]], np.float16))[0]
    np.testing.assert_array_equal(values[:16], upper[:16])


def test_every_finite_scale_is_the_upper_part_of_an_fp16() -> None:
    values = scale_values(np.arange(248, dtype=np.uint8))
    assert np.isfinite(values).all()
    assert (np.diff(values) > 0).all()
    assert (values[0], values[1], values[ONE], values[247]) == (0, 2.0**-17, 1, 61440)


def test_ties_go_to_the_even_code() -> None:
    ties = np.array([edge for edge, _ in EDGES], np.float32)

    def indices(values: NDArray[np.float32]) -> list[int]:
        row = np.concatenate([ANCHOR[:8], values, [0], -values, [0], ANCHOR[:96]]).astype(np.float32)[None]
        row[0, :8] = 6
        codes, planes = FP5.quantize(row)
        assert planes[0, 0] == ONE
        nibbles, low = unpack(codes, 4)[0], np.unpackbits(planes[0], bitorder="little")
        index = (nibbles & 7) << 1 | low
        assert index[8:23].tolist() == index[24:39].tolist()
        assert (nibbles[24:39] >> 3).all()
        return [int(i) for i in index[8:23]]

    assert indices(ties) == [(k + 1) // 2 * 2 for k in range(15)]
    assert indices(np.nextafter(ties, np.float32(0))) == list(range(15))
    assert indices(np.nextafter(ties, np.float32(9))) == list(range(1, 16))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_scale_is_the_best_of_the_candidates(head_dim: int) -> None:
    for kind in ("gauss", "outlier", "fine ties", "constant", "one element", "fp16 range"):
        rows = tricky_rows(head_dim)[kind]
        _, planes = FP5.quantize(rows)
        half = np.minimum(np.abs(rows).max(-1) * SCALE_FACTOR, 61440).astype(np.float16)
        base = np.maximum(half.view(np.uint16) >> 7, 1)
        errors, candidates = [], []
        for step in STEPS:
            byte = np.minimum(base + step, 247)
            scale = scale_values(byte.astype(np.uint8)).astype(np.float64)[:, None]
            grid = np.abs(rows)[..., None] / scale[..., None]
            fine = np.abs(grid - MAGNITUDES).min(-1)
            fine[:, :8] = np.abs(grid - MAGNITUDES[::2]).min(-1)[:, :8]
            errors.append(((fine * scale) ** 2).sum(-1))
            candidates.append(byte)
        chosen = np.array(candidates) == planes[:, 0]
        assert chosen.any(0).all(), kind
        best = np.array(errors).min(0)
        mine = np.where(chosen, errors, np.inf).min(0)
        # float32 may order two nearly equal errors differently
        assert (mine <= best * (1 + 1e-5) + 1e-30).all(), kind


def test_huge_rows_saturate_and_stay_finite() -> None:
    limit = 7 * 61440.0
    row = np.array(
        [[3e38, 1, 0, 0, 0, 0, 0, 0, 3e38, -3e38, limit, limit - 61440, -1e6, 1.0, 0, 0]], np.float32
    )
    codes, planes = FP5.quantize(row)
    assert planes[0, 0] == 247
    back = FP5.dequantize(codes, planes)[0].tolist()
    assert back == [6 * 61440.0, *[0.0] * 7, limit, -limit, limit, limit - 61440, -limit, 0, 0, 0]


@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 256])
def test_a_value_takes_five_bits_with_everything(head_dim: int) -> None:
    assert FP5.row_bytes(head_dim) * 8 == 5 * head_dim
    with pytest.raises(ValueError, match="multiple of 8 values"):
        FP5.row_bytes(head_dim - 4)


@pytest.mark.parametrize(("head_dim", "limit"), [(64, 0.057), (128, 0.056), (256, 0.059)])
@pytest.mark.parametrize("factor", [1, 8, 30])
def test_rotation_holds_outlier_channels_at_the_gaussian_error(
    head_dim: int, limit: float, factor: int
) -> None:
    rng = np.random.default_rng(8)
    rows = rng.standard_normal((2000, head_dim)).astype(np.float32)
    rows[:, rng.choice(head_dim, 4, replace=False)] *= factor
    assert relative_rms(FP5.restore(*FP5.store(rows)[:2]), rows) < limit
