from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from native import require_extension

_ext = require_extension()

from octavo.engine.executor.native import linear as native  # noqa: E402
from octavo.kernels.channel_weights import BITS, QUANTIZE  # noqa: E402

pytestmark = pytest.mark.parity


def check_stacked(outputs: tuple[int, ...], dtype: mx.Dtype, group: int, bits: int, mode: str) -> None:
    inputs = 3 * max(group, 32)
    parts = [
        mx.quantize(mx.random.normal((count, inputs)).astype(dtype), group, bits, mode) for count in outputs
    ]
    arrays = [list(each) for each in zip(*parts, strict=True)]
    copies = [mx.concatenate(each) for each in arrays]
    bias, x = mx.random.normal((sum(outputs),)), mx.random.normal((3, inputs)).astype(dtype)
    if mode == "affine":
        stacked = _ext.pack_stacked_affine(*arrays, group_size=group, bits=bits, bias=bias)
        whole = _ext.pack_affine(*copies, group_size=group, bits=bits, bias=bias)
    else:
        stacked = _ext.pack_stacked_fp4(*arrays, mode=mode, bias=bias)
        whole = _ext.pack_fp4(*copies, mode=mode, bias=bias)
    back = _ext.unpack(stacked)
    assert all(mx.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(back, copies, strict=True))
    assert stacked.nbytes == whole.nbytes
    assert mx.array_equal(_ext.linear(x, stacked), _ext.linear(x, whole))


@pytest.mark.parametrize("group", native.AFFINE_GROUP_SIZES)
@pytest.mark.parametrize("bits", native.AFFINE_BITS)
@pytest.mark.parametrize("outputs", [(1,), (63, 1, 2), (130, 64, 65), (5, 200)])
def test_affine_weights_packed_as_one_are_one_below_the_other(
    outputs: tuple[int, ...], bits: int, group: int
) -> None:
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        check_stacked(outputs, dtype, group, bits, "affine")


@pytest.mark.parametrize(("mode", "group"), [("mxfp4", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("outputs", [(1,), (63, 1, 2), (130, 64, 65)])
def test_fp4_weights_packed_as_one_are_one_below_the_other(
    outputs: tuple[int, ...], mode: str, group: int
) -> None:
    check_stacked(outputs, mx.bfloat16, group, 4, mode)


@pytest.mark.skipif(_ext.isa() not in ("avx512", "amx"), reason="lower levels take the scales of groups")
@pytest.mark.parametrize("kind", ["w8a8", "w4a8"])
def test_weights_are_of_channels_if_each_output_is_one(kind: str) -> None:
    def packed(*parts: Sequence[mx.array]) -> Any:
        arrays = [list(each) for each in zip(*parts, strict=True)]
        return _ext.pack_stacked_affine(*arrays, group_size=64, bits=BITS[kind])

    weight = mx.random.normal((130, 256)).astype(mx.bfloat16)
    channels, others = QUANTIZE[kind](weight, 64), mx.quantize(weight[:70], 64, BITS[kind])
    assert packed(channels).unread_nbytes == 3 * 64 * 4 * 2 * 2
    assert packed(channels, channels).unread_nbytes == 5 * 64 * 4 * 2 * 2
    for mixed in ((channels, others), (others, channels), (channels, others, channels)):
        assert packed(*mixed).unread_nbytes == 0
        wanted = [mx.concatenate(list(arrays)) for arrays in zip(*mixed, strict=True)]
        assert all(map(mx.array_equal, _ext.unpack(packed(*mixed)), wanted))


def test_quantized_weights_that_do_not_stack_are_named() -> None:
    codes, scales, biases = mx.quantize(mx.zeros((8, 128)), 32, 4)
    settings = {"group_size": 32, "bits": 4}
    with pytest.raises(ValueError, match="at least one weight"):
        _ext.pack_stacked_affine([], [], [], **settings)
    with pytest.raises(ValueError, match="at least one weight"):
        _ext.pack_stacked_fp4([], [], mode="mxfp4")
    with pytest.raises(ValueError, match="scales must be as many arrays as codes, 2, got 1"):
        _ext.pack_stacked_affine([codes, codes], [scales], [biases, biases], **settings)
    with pytest.raises(ValueError, match="biases must be as many arrays as codes, 1, got 2"):
        _ext.pack_stacked_affine([codes], [scales], [biases, biases], **settings)
    with pytest.raises(ValueError, match=r"the same inputs, got \[8, 16\] and \[8, 8\]"):
        _ext.pack_stacked_affine([codes, codes[:, :8]], [scales, scales[:, :2]], [biases, biases], **settings)
    with pytest.raises(ValueError, match=r"scales must have shape .*\[7, 4\] for codes \[7, 16\]"):
        _ext.pack_stacked_affine([codes, codes[:7]], [scales, scales], [biases, biases[:7]], **settings)
    half = [scales.astype(mx.float16), biases.astype(mx.float16)]
    with pytest.raises(ValueError, match=r"must share a type .* got float16 and float16"):
        _ext.pack_stacked_affine([codes, codes], [scales, half[0]], [biases, half[1]], **settings)
    with pytest.raises(ValueError, match="scales of mxfp4 must be uint8, got float32"):
        _ext.pack_stacked_fp4([codes, codes], [scales.astype(mx.uint8), scales], mode="mxfp4")
