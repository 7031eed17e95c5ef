"""Checks of native mixtures of experts at one instruction set, against float64."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np

from linear_checks import FLOATS, ROUNDING, random, relative_error, truth_of
from octavo.kernels import _ext

NUM_EXPERTS = 5
# (shape of x without its last axis, shape of expert IDs).
SHAPES = (
    ((3, 1, 1), (3, 2)),
    ((40, 1), (40,)),
    ((2, 4, 1, 1), (2, 4, 3)),
    ((6, 3), (6,)),
    ((1, 2), (4, 5)),
    ((7, 1), ()),
    ((0, 1), (0,)),
)


def packed_experts(
    rng: np.random.Generator, outputs: int, inputs: int, dtype: mx.Dtype, bits: int | None
) -> tuple[mx.array, mx.array, list[_ext.PackedWeight]]:
    """Return weights [experts, outputs, inputs], biases [experts, outputs], and both packed."""
    weight = random(rng, (NUM_EXPERTS, outputs, inputs), dtype)
    bias = random(rng, (NUM_EXPERTS, outputs), dtype)
    if bits is None:
        return weight, bias, [_ext.pack_dense(weight[e], bias[e]) for e in range(NUM_EXPERTS)]
    arrays = mx.quantize(weight, 32, bits)
    codes, scales, biases = arrays
    wide = mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), 32, bits)
    packed = [
        _ext.pack_affine(*(array[e] for array in arrays), group_size=32, bits=bits, bias=bias[e])
        for e in range(NUM_EXPERTS)
    ]
    return wide, bias, packed


def check_experts() -> None:
    rng = np.random.default_rng(0)
    for (outputs, inputs), dtype, bits, exact in itertools.product(
        ((70, 64), (130, 160)), FLOATS, (None, 8, 4), (False, True)
    ):
        weight, bias, packed = packed_experts(rng, outputs, inputs, dtype, bits)
        experts = _ext.PackedExperts(packed)
        for x_shape, ids_shape in SHAPES:
            x = random(rng, (*x_shape, inputs), dtype)
            ids = rng.integers(0, NUM_EXPERTS, ids_shape)
            y = _ext.gather_linear(x, experts, mx.array(ids.astype(np.uint32)), exact=exact)
            batch = np.broadcast_shapes(x_shape[:-1], ids_shape)
            assert y.shape == (*batch, x_shape[-1], outputs)
            assert y.dtype == dtype
            wide_x, wide_ids = mx.broadcast_to(x, (*batch, x_shape[-1], inputs)), np.broadcast_to(ids, batch)
            for place in np.ndindex(*batch):
                expert = int(wide_ids[place])
                assert mx.array_equal(y[place], _ext.linear(wide_x[place], packed[expert], exact=exact)), (
                    outputs,
                    inputs,
                    dtype,
                    bits,
                    exact,
                    x_shape,
                    ids_shape,
                )
            if exact:
                matrices = truth_of(weight)[wide_ids].swapaxes(-1, -2)
                truth = truth_of(wide_x) @ matrices + truth_of(bias)[wide_ids][..., None, :]
                assert relative_error(y, truth) < ROUNDING[dtype]


def check_strides_and_threads() -> None:
    rng = np.random.default_rng(1)
    packed = packed_experts(rng, 96, 64, mx.bfloat16, None)[2]
    experts = _ext.PackedExperts(packed)
    wide = random(rng, (40, 2, 128), mx.bfloat16)
    ids = mx.array(rng.integers(0, NUM_EXPERTS, (2, 40))).T
    for x in (wide[:, None, :1, ::2], wide[:, None, 1:, 64:]):
        _ext.set_threads(1)
        expected = _ext.gather_linear(mx.contiguous(x), experts, mx.contiguous(ids))
        mx.eval(expected)
        for threads in (1, 2, 5):
            _ext.set_threads(threads)
            assert mx.array_equal(_ext.gather_linear(x, experts, ids), expected)


def main() -> None:
    mx.set_default_device(mx.cpu)
    check_experts()
    check_strides_and_threads()
    print(f"checked {_ext.isa()}")


if __name__ == "__main__":
    main()
