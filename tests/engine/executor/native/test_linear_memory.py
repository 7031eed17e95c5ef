from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from native import require_extension

pytestmark = pytest.mark.parity

_ext = require_extension()

MANY_PANELS = 64 * 83 + 17


def quantized(outputs: int, bits: int) -> list[mx.array]:
    return list(mx.quantize(mx.random.normal((outputs, 128)).astype(mx.bfloat16), 64, bits))


def test_small_weights_outlive_their_neighbours() -> None:
    arrays = [quantized(outputs, 4) for outputs in (7, 64, 130, 1, 65)]
    packed = [_ext.pack_affine(*parts, group_size=64, bits=4) for parts in arrays]
    del packed[1::2]
    gc.collect()
    packed.append(_ext.pack_affine(*quantized(300, 4), group_size=64, bits=4))
    for weight, parts in zip(packed, arrays[::2], strict=False):
        for part, expected in zip(_ext.unpack(weight), parts, strict=True):
            assert mx.array_equal(part, expected)


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_runs_of_panels_give_every_output_whatever_the_threads(rows: int, bits: int) -> None:
    weight = mx.random.normal((MANY_PANELS, 128)).astype(mx.bfloat16)
    x = mx.random.normal((rows, 128)).astype(mx.bfloat16)
    if bits == 16:
        packed, dense = _ext.pack_dense(weight), weight
    else:
        parts = mx.quantize(weight, 64, bits)
        packed, dense = (
            _ext.pack_affine(*parts, group_size=64, bits=bits),
            mx.dequantize(*parts, group_size=64, bits=bits),
        )
    before = _ext.threads()
    try:
        results = []
        for threads in (1, 2, 3):
            _ext.set_threads(threads)
            results.append(_ext.linear(x, packed))
            mx.eval(results[-1])
    finally:
        _ext.set_threads(before)
    assert all(mx.array_equal(result, results[0]) for result in results)
    exact = np.array(x.astype(mx.float32) @ dense.astype(mx.float32).T)
    error = np.abs(np.array(results[0].astype(mx.float32)) - exact).max()
    assert error < 0.03 * np.abs(exact).max()
