"""Checks of native linear layers against float64, run in one process per instruction set."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from octavo.kernels import _ext

Truth = NDArray[np.float64]

SHAPES = ((64, 64), (7, 32), (100, 96), (192, 33), (65, 128), (64, 1), (257, 130), (70, 610))
ROWS = (1, 2, 3, 5, 16, 17, 33, 100)
FLOATS = (mx.bfloat16, mx.float16, mx.float32)
# One rounding of the result, and of the activations where a kernel may round them too, relative to
# the largest result; float32 sums add little.
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
    """Every pair of types, odd shapes, bias and residual, exact and not."""
    rng = np.random.default_rng(0)
    for (outputs, inputs), weight_type, x_type in itertools.product(SHAPES, FLOATS, FLOATS):
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


def check_quantized() -> None:
    """All groups and bits: exact ones to rounding, the others within the documented bound."""
    rng = np.random.default_rng(1)
    for (outputs, inputs), group, bits, dtype in itertools.product(
        ((7, 128), (130, 384), (64, 256)), (32, 64, 128), (4, 8), FLOATS
    ):
        arrays = mx.quantize(random(rng, (outputs, inputs), dtype), group, bits)
        packed = _ext.pack_affine(*arrays, group_size=group, bits=bits)
        codes, scales, biases = arrays
        weight = truth_of(
            mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), group, bits)
        )
        x = random(rng, (33, inputs), dtype)
        truth = truth_of(x) @ weight.T
        assert relative_error(_ext.linear(x, packed, exact=True), truth) < ROUNDING[dtype]
        error = np.abs(truth_of(_ext.linear(x, packed)) - truth)
        rounding = ROUNDING[mx.bfloat16] * np.abs(truth).max()
        assert (error <= int8_bound(truth_of(x), weight, group) + rounding).all()
        # Errors of single activations are independent: the usual one is far below the bound.
        assert np.sqrt((error**2).mean()) < 0.012 * np.sqrt((truth**2).mean())
        ids = mx.array([[0, outputs - 1], [-1, 3]])
        rows = truth_of(_ext.take_rows(packed, ids))
        assert np.abs(rows - weight[np.array(ids)]).max() <= ROUNDING[dtype] * np.abs(weight).max()


def int8_bound(x: Truth, weight: Truth, group: int) -> Truth:
    """max|x| / 254 times sum|w|, group by group: what 8-bit activations may cost."""
    grouped = np.abs(x).reshape(len(x), -1, group).max(-1) / 254
    weights = np.abs(weight).reshape(len(weight), -1, group).sum(-1)
    bound: Truth = grouped @ weights.T
    return bound


def check_batch_invariance() -> None:
    """A row's result has the same bits alone, in any batch, and on any number of threads."""
    rng = np.random.default_rng(2)
    weights = []
    for dtype in FLOATS:
        dense = random(rng, (200, 640), dtype)
        weights.append((dtype, _ext.pack_dense(dense)))
        for bits in (4, 8):
            arrays = mx.quantize(dense, 64, bits)
            weights.append((dtype, _ext.pack_affine(*arrays, group_size=64, bits=bits)))
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


def main() -> None:
    mx.set_default_device(mx.cpu)
    for check in (check_dense, check_quantized, check_batch_invariance, check_small_ops):
        check()
    print(f"checked {_ext.isa()}")


if __name__ == "__main__":
    main()
