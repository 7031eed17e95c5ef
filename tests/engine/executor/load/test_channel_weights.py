"""Weights in 8 bits with one scale per output channel, in MLX's affine format."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from octavo.engine.executor.load import channel_weights


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("shape", [(5, 128), (3, 4, 64), (9000, 64)])  # 9000: more rows than fit at once
def test_errors_are_at_most_half_a_step_and_what_rounding_the_scale_moves(
    dtype: mx.Dtype, shape: tuple[int, ...]
) -> None:
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
