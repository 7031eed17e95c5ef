"""Native affine quantization compared with ``mx.quantize``; ``main`` runs at one instruction set."""

from __future__ import annotations

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
from hypothesis import given

from channel_checks import FLOATS, GROUP_SIZES, bits_of, run, weights
from octavo.kernels import _ext

BITS = (4, 8)


def check_same(weight: mx.array, group_size: int, bits: int) -> None:
    got = _ext.quantize_weights(weight, group_size=group_size, bits=bits)
    wanted = mx.quantize(mx.contiguous(weight), group_size, bits)
    for name, a, b in zip(("codes", "scales", "biases"), got, wanted, strict=True):
        what = f"{name} of {bits} bits, {weight.dtype} in groups of {group_size}"
        assert (a.dtype, a.shape) == (b.dtype, b.shape), what
        assert np.array_equal(bits_of(a), bits_of(b)), f"other {what}"


@given(st.data(), st.sampled_from(GROUP_SIZES), st.sampled_from(BITS))
def check_floats(data: st.DataObject, group_size: int, bits: int) -> None:
    check_same(data.draw(weights(group_size)), group_size, bits)


def check_layers() -> None:
    rng, threads = np.random.default_rng(7), _ext.threads()
    for bits in BITS:
        for dtype in FLOATS:
            wide = mx.array(rng.standard_normal((256, 700)) * 0.02).astype(dtype)
            for weight in (wide[:, :640], wide.T, mx.stack([wide[:, :128], wide[:, 128:256]])):
                for count in (1, 2, 5):
                    _ext.set_threads(count)
                    check_same(weight, 64, bits)
    _ext.set_threads(threads)


def main() -> None:
    run(check_floats)
    check_layers()
    print("checked", _ext.isa())
