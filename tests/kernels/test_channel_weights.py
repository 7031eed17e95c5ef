from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from octavo.kernels import channel_weights


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("shape", [(5, 128), (3, 4, 64), (9000, 64)])  # 9000: more rows than fit at once
def test_errors_are_at_most_half_a_step_plus_scale_rounding(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    weight = mx.array(rng.standard_normal(shape) * rng.uniform(0.01, 10, (*shape[:-1], 1))).astype(dtype)
    codes, scales, biases = channel_weights.quantize_channels(weight, 64)
    assert codes.shape == (*shape[:-1], shape[-1] // 4)
    assert scales.shape == biases.shape == (*shape[:-1], shape[-1] // 64)
    assert scales.dtype == biases.dtype == dtype
    assert mx.array_equal(biases, -128 * scales)
    assert mx.array_equal(scales, mx.broadcast_to(scales[..., :1], scales.shape))
    wide = mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), 64, 8)
    error = mx.abs(wide - weight.astype(mx.float32))
    step = scales[..., :1].astype(mx.float32)
    largest = mx.max(mx.abs(weight.astype(mx.float32)), axis=-1, keepdims=True)
    assert mx.all(error <= step / 2 + mx.maximum(largest - 127 * step, 0) + 1e-6 * largest)


def test_codes_are_symmetric_and_zeros_stay_zero() -> None:
    weight = mx.array([[-4.0, 2.0] + [0.0] * 62, [0.0] * 64])
    codes, scales, biases = channel_weights.quantize_channels(weight, 64)
    assert codes.view(mx.uint8)[0, :3].tolist() == [1, 128 + 64, 128]
    assert codes.view(mx.uint8)[1].tolist() == [128] * 64
    assert mx.array_equal(mx.dequantize(codes, scales, biases, 64, 8)[1], weight[1])


def two_levels(weight: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    codes, scales, biases = channel_weights.quantize_two_levels(weight, 64)
    wide = mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), 64, 4)
    shape = (-1, weight.shape[-1] // 64, 64)
    step = scales.astype(mx.float32).reshape(*shape[:-1], 1)
    return wide.reshape(shape), step, -biases.astype(mx.float32).reshape(*shape[:-1], 1) / step


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("shape", [(5, 128), (3, 4, 64), (2100, 256)])
@pytest.mark.parametrize("kind", ["normal", "skewed", "few"])
def test_two_levels_are_whole_multiples_of_a_power_of_two_and_near_the_weights(
    dtype: mx.Dtype, shape: tuple[int, ...], kind: str
) -> None:
    rng = np.random.default_rng(4)
    drawn = rng.standard_normal(shape) if kind == "normal" else rng.gamma(2, 1, shape) - 0.5
    if kind == "few":
        drawn = np.where(rng.random(shape) < 0.02, drawn, 0)
    weight = mx.array(drawn * rng.uniform(0.01, 10, (*shape[:-1], 1))).astype(dtype)
    wide, step, zero = two_levels(weight)
    values = weight.astype(mx.float32).reshape(wide.shape)
    least, most = (mx.minimum(mx.min(values, -1), 0), mx.maximum(mx.max(values, -1), 0))
    smallest = mx.maximum((most - least) / 15 / 16, mx.maximum(most, -least) / 115)
    unit = mx.power(2.0, mx.ceil(mx.log2(mx.maximum(mx.max(smallest, axis=-1), 2.0**-24))))[:, None, None]
    for whole in (zero, step / unit, wide / unit):
        assert mx.array_equal(whole, mx.round(whole))
    assert mx.all(step / unit <= 16)
    assert mx.all((wide / unit >= -128) & (wide / unit <= 127))
    assert mx.all(mx.abs(wide - values) <= (step + 8 * unit) * 1.001)
