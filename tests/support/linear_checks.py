"""Checks of native linear layers at one instruction set, against float64."""

from __future__ import annotations

import hashlib
import io
import itertools

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from octavo.kernels import _ext
from octavo.kernels.channel_weights import QUANTIZE

Truth = NDArray[np.float64]

SHAPES = ((64, 64), (7, 32), (100, 96), (192, 33), (65, 128), (64, 1), (257, 130), (70, 610), (160, 64))
ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 100)
FLOATS = (mx.bfloat16, mx.float16, mx.float32)
# Relative to the largest result: the rounding of the result, and of activations where a kernel rounds them.
ROUNDING = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11, mx.float32: 2e-6}


def truth_of(array: mx.array) -> Truth:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(rng.standard_normal(shape)).astype(dtype)


def relative_error(result: mx.array, truth: Truth) -> float:
    if not truth.size:
        return 0.0
    return float(np.abs(truth_of(result) - truth).max() / np.abs(truth).max())


def check_dense() -> None:
    rng = np.random.default_rng(0)
    for number, (outputs, inputs) in enumerate(SHAPES * 3):
        weight_type, x_type = FLOATS[number % 3], FLOATS[number // 3 % 3]
        weight, bias = random(rng, (outputs, inputs), weight_type), random(rng, (outputs,), weight_type)
        packed = _ext.pack_dense(weight, bias)
        x = random(rng, (max(ROWS), inputs), x_type)
        truth = truth_of(x) @ truth_of(weight).T + truth_of(bias)
        for exact in (False, True):
            y = _ext.linear(x, packed, exact=exact)
            assert y.dtype == mx.result_type(x, weight)
            limit = ROUNDING[y.dtype]
            if not exact and y.dtype == mx.float16:
                limit = ROUNDING[mx.bfloat16]  # activations may be rounded to bf16
            assert relative_error(y, truth) < limit, (outputs, inputs, weight_type, x_type, exact)
            residual = random(rng, y.shape, y.dtype)
            added = _ext.linear(x, packed, residual=residual, exact=exact)
            assert relative_error(added, truth + truth_of(residual)) < limit


def quantized(
    dense: mx.array, group: int, bits: int, mode: str = "affine"
) -> tuple[_ext.PackedWeight, Truth]:
    codes, scales, *biases = mx.quantize(dense, group, bits, mode)
    if mode != "affine":
        wide = mx.dequantize(codes, scales, None, group, bits, mode, dtype=mx.float32)
        return _ext.pack_fp4(codes, scales, mode=mode), truth_of(wide)
    packed = _ext.pack_affine(codes, scales, biases[0], group_size=group, bits=bits)
    wide = mx.dequantize(codes, scales.astype(mx.float32), biases[0].astype(mx.float32), group, bits)
    return packed, truth_of(wide)


def quantized_cases() -> list[tuple[int, int, str]]:
    affine = itertools.product((32, 64, 128), (1, 2, 3, 4, 5, 6, 8), ("affine",))
    return [*affine, (32, 4, "mxfp4"), (16, 4, "nvfp4")]


def check_quantized() -> None:
    rng = np.random.default_rng(1)
    cases = itertools.product(((7, 128), (130, 384)), quantized_cases())
    for ((outputs, inputs), (group, bits, mode)), dtype in zip(cases, itertools.cycle(FLOATS), strict=False):
        packed, weight = quantized(random(rng, (outputs, inputs), dtype), group, bits, mode)
        x = random(rng, (33, inputs), dtype)
        truth = truth_of(x) @ weight.T
        case = (outputs, inputs, group, bits, mode, dtype)
        y = _ext.linear(x, packed, exact=True)
        assert y.dtype == dtype
        assert relative_error(y, truth) < ROUNDING[dtype], case
        error = np.abs(truth_of(_ext.linear(x, packed)) - truth)
        rounding = ROUNDING[mx.bfloat16] * np.abs(truth).max()
        assert (error <= int8_bound(truth_of(x), weight, group, bits) + rounding).all(), case
        # Errors of single activations are independent, so the RMS error is far below the bound.
        assert np.sqrt((error**2).mean()) < 0.012 * np.sqrt((truth**2).mean()), case
        ids = mx.array([[0, outputs - 1], [-1, 3]])
        rows = truth_of(_ext.take_rows(packed, ids))
        result = mx.bfloat16 if mode != "affine" else dtype
        assert np.abs(rows - weight[np.array(ids)]).max() <= ROUNDING[result] * np.abs(weight).max()


def check_extreme_rows() -> None:
    """Integer sums of extreme codes must neither saturate nor wrap."""
    for group, bits, mode in quantized_cases():
        inputs = 2 * group
        for sign, pattern in itertools.product((1, -1), (0, 1, 2, 3)):
            # Groups: all largest, all smallest, alternating, alternating pairs.
            row = np.where(np.arange(inputs) // (1, group, 1, 2)[pattern] % 2 == (pattern > 0), 1.0, -1.0)
            dense = mx.array(np.tile(sign * row, (64, 1)).astype(np.float16))
            packed, weight = quantized(dense, group, bits, mode)
            x = mx.array(np.stack([row, -row, np.ones(inputs), -np.ones(inputs)])).astype(mx.float16)
            y = truth_of(_ext.linear(x, packed))
            assert np.abs(y - truth_of(x) @ weight.T).max() < 0.02 * np.abs(weight).sum(1).max()
        for bad in (np.nan, np.inf, -np.inf):
            x = mx.array(np.stack([row, np.where(np.arange(inputs) == 3, bad, row), row])).astype(mx.float16)
            y = truth_of(_ext.linear(x, packed))
            assert not np.isfinite(y[1]).any(), (group, bits, mode, bad)
            assert np.array_equal(y[0], y[2])
            assert np.isfinite(y[0]).all()


def int8_bound(x: Truth, weight: Truth, group: int, bits: int) -> Truth:
    """Return max|x| / 254 times sum|w| per group: the error bound of 8-bit activations.

    For 8-bit codes, AVX2 also keeps sums of two inputs in 8 bits."""
    sizes = np.abs(x)
    if bits == 8:
        sums = np.abs(x.reshape(len(x), -1, 2).sum(-1))
        sizes = np.maximum(sizes, np.repeat(sums, 2, axis=-1))
    grouped = sizes.reshape(len(x), -1, group).max(-1) / 254
    weights = np.abs(weight).reshape(len(weight), -1, group).sum(-1)
    bound: Truth = grouped @ weights.T
    return bound


def by_channels(
    dense: mx.array, group: int, bits: int = 8
) -> tuple[_ext.PackedWeight, NDArray[np.int64], Truth]:
    """Return packed weights, their integer multiples, and scales [outputs, 1]."""
    codes, scales, biases = QUANTIZE["w8a8" if bits == 8 else "w4a8"](dense, group)
    packed = _ext.pack_affine(codes, scales, biases, group_size=group, bits=bits)
    assert all(map(mx.array_equal, _ext.unpack(packed), (codes, scales, biases)))
    step, start = scales.astype(mx.float32), biases.astype(mx.float32)
    wide = truth_of(mx.dequantize(codes, step, start, group, bits))
    unit = truth_of(scales).min(-1, keepdims=True)
    if bits == 4:
        unit = 2.0 ** (np.floor(np.log2(unit)) - 4)
    multiples = np.rint(wide / np.where(unit > 0, unit, 1))
    assert np.allclose(multiples * unit, wide, rtol=0, atol=0.001 * unit)
    return packed, multiples.astype(np.int64), unit


def check_channels() -> None:
    rng = np.random.default_rng(8)
    for bits, (outputs, inputs), group, dtype in itertools.product(
        (8, 4), ((7, 128), (130, 640)), (32, 64, 128), (mx.bfloat16, mx.float16)
    ):
        packed, codes, scales = by_channels(random(rng, (outputs, inputs), dtype), group, bits)
        weight = codes * scales
        held = -(-outputs // 64) * 64 * (inputs // group) * 2 * dtype.size
        assert packed.unread_nbytes == (held if _ext.isa() in ("avx512", "amx") else 0)
        for row in (0, outputs - 1):
            taken = truth_of(_ext.take_rows(packed, mx.array(row)))
            assert np.abs(taken - weight[row]).max() <= ROUNDING[dtype] * np.abs(weight).max()
        for rows in (1, 5, 6, 7, 17, 80, 300):
            x = random(rng, (rows, inputs), dtype)
            x[0, :64] = 0
            y = _ext.linear(x, packed)
            truth = truth_of(x) @ weight.T
            assert relative_error(_ext.linear(x, packed, exact=True), truth) < ROUNDING[dtype]
            if _ext.isa() in ("avx512", "amx"):
                assert mx.array_equal(y, channel_products(x, codes, scales)), (bits, inputs, group, rows)
            bound = int8_bound(truth_of(x), weight, inputs, bits) + ROUNDING[dtype] * np.abs(truth).max()
            assert (np.abs(truth_of(y) - truth) <= bound).all()
        for value in (np.inf, np.nan):
            x = random(rng, (3, inputs), dtype)
            x[1, 5] = value
            finite = mx.isfinite(_ext.linear(x, packed)).all(-1).tolist()
            assert finite == [True, False, True]
        # The largest sum of products fits in 32 bits.
        ones = mx.ones((2, inputs), dtype)
        packed, codes, scales = by_channels(mx.ones((outputs, inputs), dtype), group, bits)
        assert relative_error(_ext.linear(ones, packed), truth_of(ones) @ (codes * scales).T) < 0.01


def channel_products(x: mx.array, codes: NDArray[np.int64], scales: Truth) -> mx.array:
    """y = a s (q . xq) with float32 products, as in kernels/csrc/linear/channels_avx512.h."""
    values = np.array(x.astype(mx.float32))
    limit = np.abs(values).max(-1, keepdims=True)
    inverse = np.where(limit > 1e-30, np.float32(127) / np.maximum(limit, 1e-30), 0).astype(np.float32)
    dots = np.rint(values * inverse).astype(np.float64) @ codes.T.astype(np.float64)  # exact
    sums = dots.astype(np.float32) * scales.astype(np.float32)[:, 0] * (limit / np.float32(127))
    return mx.array(sums).astype(x.dtype)


def check_batch_invariance() -> None:
    """A row has equal bits alone, in any batch, and with any number of threads."""
    rng = np.random.default_rng(2)
    weights = []
    for dtype in FLOATS:
        dense = random(rng, (200, 640), dtype)
        weights.append((dtype, _ext.pack_dense(dense)))
        for group, bits, mode in ((64, 4, "affine"), (64, 8, "affine"), (16, 4, "nvfp4")):
            weights.append((dtype, quantized(dense, group, bits, mode)[0]))
    dense = random(rng, (200, 640), mx.bfloat16)
    weights += [
        (mx.bfloat16, quantized(dense, group, bits)[0]) for group, bits in ((32, 8), (128, 8), (128, 4))
    ]
    weights += [(mx.bfloat16, by_channels(dense, 64, bits)[0]) for bits in (8, 4)]
    # Scales that overflow when multiplied by a 23-bit integer.
    weights.append((mx.bfloat16, quantized(dense * 1e32, 64, 4)[0]))
    for (dtype, packed), exact in itertools.product(weights, (False, True)):
        x = random(rng, (600, 640), dtype)
        _ext.set_threads(1)
        whole = _ext.linear(x, packed, exact=exact)
        mx.eval(whole)
        for threads in (2, 5):
            _ext.set_threads(threads)
            for rows in (*ROWS, 150, 600):
                part = _ext.linear(x[600 - rows :], packed, exact=exact)
                assert mx.array_equal(part, whole[600 - rows :]), (dtype, rows, threads, exact)


def check_tiny_products() -> None:
    rng = np.random.default_rng(8)

    def tiny(shape: tuple[int, int]) -> mx.array:
        return random(rng, shape, mx.float32) * mx.array(2.0 ** rng.integers(-68, -56, shape))

    packed = _ext.pack_dense(tiny((130, 96)).astype(mx.bfloat16))
    x = tiny((13, 96)).astype(mx.bfloat16)
    for gain in (1, 2.0**-60):
        whole = _ext.linear(x * gain, packed)
        for row in range(len(x)):
            assert mx.array_equal(_ext.linear(x[row : row + 1] * gain, packed), whole[row : row + 1]), row


def check_row_blocks() -> None:
    """Kernels divide rows that exceed a cache into parts."""
    rng = np.random.default_rng(12)
    dense = random(rng, (140, 4096), mx.bfloat16)
    x = random(rng, (400, 4096), mx.bfloat16)
    _ext.set_threads(2)
    for packed in (_ext.pack_dense(dense), *(by_channels(dense, 128, bits)[0] for bits in (8, 4))):
        whole = _ext.linear(x, packed)
        for first in (0, 123, 256, 380):
            rows = slice(first, first + 20)
            assert mx.array_equal(_ext.linear(x[rows], packed), whole[rows]), (packed.nbytes, first)


def nodes_of(y: mx.array) -> str:
    graph = io.StringIO()
    mx.export_to_dot(graph, y)
    return graph.getvalue()


def check_gated() -> None:
    rng = np.random.default_rng(9)
    _ext.set_threads(2)
    for (half, inputs), dtype in itertools.product(((64, 384), (192, 128), (96, 128)), FLOATS):
        dense = random(rng, (2 * half, inputs), dtype)
        bias = random(rng, (2 * half,), dtype)
        weights = [_ext.pack_dense(dense, bias), *(by_channels(dense, 64, bits)[0] for bits in (8, 4))]
        weights += [quantized(dense, *case)[0] for case in ((64, 8), (64, 4), (128, 6), (32, 4, "mxfp4"))]
        for packed, exact, rows in itertools.product(weights, (False, True), (1, 7, 100)):
            x = random(rng, (rows, inputs), dtype)

            def halves(y: mx.array, half: int = half) -> tuple[mx.array, mx.array]:
                return y[..., :half], y[..., half:]

            y = _ext.linear(x, packed, exact=exact)
            mx.eval(y)
            for activation in ("silu", "gelu_tanh"):
                apart = _ext.gated(*halves(y), activation)
                fused = _ext.gated(*halves(_ext.linear(x[None], packed, exact=exact)), activation)
                assert ("linear_gated" in nodes_of(fused)) == (half % 64 == 0)
                assert fused.dtype == apart.dtype
                assert mx.array_equal(fused[0], apart), (half, inputs, dtype, exact, rows, activation)
        swapped = _ext.gated(*halves(_ext.linear(x, packed))[::-1], "silu")
        assert "linear_gated" not in nodes_of(swapped)
        assert mx.array_equal(swapped, _ext.gated(*halves(_ext.linear(x, packed) + 0)[::-1], "silu"))
        residual = random(rng, y.shape, y.dtype)
        added = _ext.gated(*halves(_ext.linear(x, packed, residual=residual)), "silu")
        assert "linear_gated" not in nodes_of(added)


def check_argmax() -> None:
    """Check that argmax gives the largest of the stored results, also for ties and NaN."""
    rng = np.random.default_rng(6)
    for outputs, dtype, exact in itertools.product((1, 63, 64, 1000), FLOATS, (False, True)):
        dense = random(rng, (outputs, 64), dtype)
        dense[outputs // 2] = dense[0]
        for packed in (_ext.pack_dense(dense, random(rng, (outputs,), dtype)), quantized(dense, 64, 4)[0]):
            x = random(rng, (70, 64), dtype)
            x[0] = dense[0] * 9
            y = _ext.linear(x, packed, exact=exact)
            for rows in (1, 3, 37, 70):
                ids, logits = _ext.linear_argmax(x[:rows], packed, exact=exact)
                assert mx.array_equal(ids, mx.argmax(y[:rows], -1).astype(mx.int32))
                assert mx.array_equal(logits, y[:rows].max(-1).astype(mx.float32))
    packed = _ext.pack_dense(mx.array([[-1.0, 0.0]] * 70 + [[0.0, mx.nan]] + [[-2.0, 0.0]]))
    ids, logits = _ext.linear_argmax(mx.array([[[1.0, 0.0], [1.0, 1.0]]]), packed)
    assert ids.shape == logits.shape == (1, 2)
    assert mx.isnan(logits).all()
    packed = _ext.pack_dense(mx.array([[-1.0], [-0.0], [0.0]]))
    ids, logits = _ext.linear_argmax(mx.array([1.0]), packed)
    assert ids.item() == 1
    assert logits.item() == 0
    assert _ext.linear_argmax(mx.zeros((0, 1)), packed)[0].shape == (0,)


def check_small_ops() -> None:
    rng = np.random.default_rng(3)
    for dtype, (rows, size) in itertools.product(FLOATS, ((1, 1), (3, 33), (40, 1024), (2, 257))):
        x, gate = random(rng, (rows, size), dtype), random(rng, (rows, size), dtype) * 20
        weight = random(rng, (size,), dtype)
        truth = truth_of(x)
        truth = truth / np.sqrt((truth**2).mean(-1, keepdims=True) + 1e-5)
        assert relative_error(_ext.rms_norm(x, None, 1e-5), truth) < ROUNDING[dtype]
        normed = _ext.rms_norm(x, weight, 1e-5)
        assert relative_error(normed, truth * truth_of(weight)) < ROUNDING[dtype]
        gates = truth_of(gate)
        swiglu = gates / (1 + np.exp(-gates)) * truth_of(x)
        assert relative_error(_ext.gated(gate, x, "silu"), swiglu) < ROUNDING[dtype]
        centred = truth_of(x) - truth_of(x).mean(-1, keepdims=True)
        layered = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        assert np.abs(truth_of(_ext.layer_norm(x, None, None, 1e-5)) - layered).max() < 4 * ROUNDING[dtype]
    for dtype, dims in itertools.product(FLOATS, (2, 20, 64)):
        x = random(rng, (5, 3, 2, 64), dtype)
        frequencies = rng.uniform(0, 1, dims // 2).astype(np.float32)
        offsets = np.array([0, 1, 7, 100, 4000])
        got = _ext.rope(x, mx.array(offsets), mx.array(frequencies), dims=dims)
        angles = (offsets[:, None] + np.arange(2))[:, None, :, None].astype(np.float32) * frequencies
        wanted, first, second = truth_of(x), truth_of(x)[..., : dims // 2], truth_of(x)[..., dims // 2 : dims]
        wanted[..., : dims // 2] = first * np.cos(angles) - second * np.sin(angles)
        wanted[..., dims // 2 : dims] = first * np.sin(angles) + second * np.cos(angles)
        assert relative_error(got, wanted) < ROUNDING[dtype]


def main() -> None:
    mx.set_default_device(mx.cpu)
    checks = (check_dense, check_quantized, check_channels, check_extreme_rows, check_batch_invariance)
    for check in (*checks, check_tiny_products, check_row_blocks, check_gated, check_argmax, check_small_ops):
        check()
    print(f"checked {_ext.isa()}")


if __name__ == "__main__":
    main()


def print_integer_digest() -> None:
    rng, digest = np.random.default_rng(11), hashlib.sha256()
    for group, bits, mode in quantized_cases():
        if mode == "affine" and bits in (8, 4):
            continue
        packed, _ = quantized(random(rng, (130, 384), mx.bfloat16), group, bits, mode)
        for rows in (1, 2, 5, 6, 7, 13, 20, 97):
            x = random(rng, (rows, 384), mx.bfloat16)
            x[0, :64] = 0
            if rows > 1:
                x[1, 5] = np.inf
            y = np.array(_ext.linear(x, packed).view(mx.uint16))
            y[(y & 0x7FFF) > 0x7F80] = 0x7FC0
            digest.update(y.tobytes())
    print(digest.hexdigest())
