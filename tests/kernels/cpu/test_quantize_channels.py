from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from native import at_every_level, require_extension, run_at_level

pytestmark = pytest.mark.parity

_ext = require_extension()

import channel_checks  # noqa: E402  it imports the extension


@pytest.mark.property
def test_channel_quantization_follows_the_definition() -> None:
    channel_checks.check_floats()


@pytest.mark.property
def test_affine_weights_requantize_like_their_floats() -> None:
    channel_checks.check_affine()


@at_every_level
def test_every_instruction_set_has_the_bits_of_the_definition(level: str) -> None:
    assert run_at_level(level, "import channel_checks; channel_checks.main()").strip() == f"checked {level}"


def test_codes_of_nan_are_zero_and_its_row_s_scales_are_nan() -> None:
    weight = mx.ones((2, 64))
    weight[0, 3] = float("nan")
    codes, scales, biases = _ext.quantize_channels(weight, group_size=32, bits=4)
    assert codes[0].tolist() == [0] * 8
    assert mx.all(mx.isnan(mx.concatenate([scales[0], biases[0]])))
    assert codes[1].tolist() == [0xFFFFFFFF] * 8
    assert mx.all(mx.isfinite(mx.concatenate([scales[1], biases[1]])))


WEIGHT, CODES, SCALES = mx.zeros((4, 128)), mx.zeros((4, 16), mx.uint32), mx.zeros((4, 2))


@pytest.mark.parametrize(
    ("arrays", "settings", "message"),
    [
        ([WEIGHT], {"bits": 2}, "bits must be 4 or 8, got 2"),
        ([CODES, SCALES, SCALES], {"bits": 3}, "bits must be 4 or 8, got 3"),
        ([WEIGHT], {"group_size": 16}, "group_size must be 32, 64 or 128, got 16"),
        ([mx.zeros((4, 96))], {}, r"w must be .* whole groups of 64, got float32 \[4, 96\]"),
        ([mx.zeros((64,))], {}, "w must be bfloat16, float16 or float32"),
        ([mx.zeros((4, 128), mx.int32)], {}, "w must be bfloat16, float16 or float32"),
        ([mx.zeros((0, 128))], {}, "w must be bfloat16, float16 or float32"),
        ([CODES[:, :12], SCALES, SCALES], {}, "codes must be uint32 .* groups of 64 codes of 4 bits"),
        ([CODES.astype(mx.int32), SCALES, SCALES], {}, "codes must be uint32"),
        ([CODES, SCALES[:, :1], SCALES], {}, "scales and biases must share a type"),
        ([CODES, SCALES, SCALES[:2]], {}, "scales and biases must share a type"),
        ([CODES, SCALES, SCALES.astype(mx.float16)], {}, "scales and biases must share a type"),
        (
            [CODES, SCALES.astype(mx.int32), SCALES.astype(mx.int32)],
            {},
            "scales and biases must share a type",
        ),
    ],
)
def test_weights_that_cannot_be_quantized_are_refused(
    arrays: list[mx.array], settings: dict[str, int], message: str
) -> None:
    kernel: Any = _ext.quantize_channels if len(arrays) == 1 else _ext.requantize_channels
    with pytest.raises(ValueError, match=message):
        kernel(*arrays, **{"group_size": 64, "bits": 4, **settings})
