from __future__ import annotations

import mlx.core as mx
import pytest

from native import at_every_level, require_extension, run_at_level

pytestmark = pytest.mark.parity

_ext = require_extension()

import affine_checks  # noqa: E402  it imports the extension


@pytest.mark.property
def test_affine_quantization_is_bit_identical_to_mlx() -> None:
    affine_checks.check_floats()


@at_every_level
def test_every_instruction_set_has_the_bits_of_mlx(level: str) -> None:
    assert run_at_level(level, "import affine_checks; affine_checks.main()").strip() == f"checked {level}"


@pytest.mark.parametrize("bits", affine_checks.BITS)
def test_nan_has_code_zero_and_leaves_the_rest_of_its_group_as_it_is(bits: int) -> None:
    clean = mx.broadcast_to(mx.arange(32) - 10.0, (30, 32))
    is_nan = mx.arange(32) == mx.arange(1, 31)[:, None]
    codes, scales, biases = _ext.quantize_weights(
        mx.where(is_nan, float("nan"), clean), group_size=32, bits=bits
    )
    wanted_codes, *wanted = _ext.quantize_weights(clean, group_size=32, bits=bits)
    assert all(map(mx.array_equal, (scales, biases), wanted))
    wide = mx.dequantize(codes, scales, biases, 32, bits)
    wanted_wide = mx.dequantize(wanted_codes, scales, biases, 32, bits)
    assert mx.array_equal(wide, mx.where(is_nan, biases, wanted_wide))
