"""Native weights with one scale per output channel; ``main`` runs at one instruction set."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray

from octavo.kernels import _ext
from octavo.kernels.channel_weights import BITS, QUANTIZE, quantize_as

Arrays = Sequence[mx.array]

FLOATS = (mx.bfloat16, mx.float16, mx.float32)
GROUP_SIZES = (32, 64, 128)


def bits_of(array: mx.array) -> NDArray[np.uint32]:
    bits = np.array(array.view(mx.uint16 if array.dtype.size == 2 else mx.uint32)).astype(np.uint32)
    if mx.issubdtype(array.dtype, mx.floating):
        bits[np.array(mx.isnan(array))] = 0xFFFFFFFF
    return bits


def native(kind: str, arrays: Arrays, group_size: int) -> Arrays:
    kernel = _ext.quantize_channels if len(arrays) == 1 else _ext.requantize_channels
    return kernel(*arrays, group_size=group_size, bits=BITS[kind])


def check_same(kind: str, arrays: Arrays, group_size: int) -> None:
    got, wanted = native(kind, arrays, group_size), quantize_as(kind, arrays, group_size)
    for name, a, b in zip(("codes", "scales", "biases"), got, wanted, strict=True):
        what = f"{name} of {kind}, {arrays[-1].dtype} in groups of {group_size}"
        assert (a.dtype, a.shape) == (b.dtype, b.shape), what
        assert np.array_equal(bits_of(a), bits_of(b)), f"other {what}"


def _normal(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    return rng.standard_normal(size)


def _equal(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    return np.full(size, rng.standard_normal())


def _positive(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    return rng.gamma(2, 1, size)


def _negative(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    return -rng.gamma(2, 1, size)


def _sparse(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    return np.where(rng.random(size) < 0.05, rng.standard_normal(size), rng.choice([0.0, -0.0], size))


def _spread(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    return rng.standard_normal(size) * np.exp2(rng.uniform(-30, 0, size))


def _ties(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    return np.append(rng.integers(-254, 255, size - 1) / 2, rng.choice([127.0, 115.0, 120.0]))


def _edges(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    near = 1 + rng.integers(-6, 7) * 2.0**-23
    return np.append(np.zeros(size - 1), rng.choice([-115.0, 115.0, 240.0]) * near)


ROWS = (_normal, _equal, _positive, _negative, _sparse, _spread, _ties, _edges)


@st.composite
def weights(draw: st.DrawFn, group_size: int) -> mx.array:
    """Return rows of many magnitudes, some with zeros, subnormals, infinities and NaN."""
    shape = draw(st.sampled_from([(1, 1), (3, 2), (5, 3), (2, 3, 1)]))
    num_rows, inputs = int(np.prod(shape[:-1])), shape[-1] * group_size
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    exponents = st.one_of(st.integers(-12, 4), st.integers(-150, 128))
    rows = [
        draw(st.sampled_from(ROWS))(rng, inputs)
        * 2.0 ** draw(exponents)
        * draw(st.sampled_from([0, 1, 1, 1]))
        for _ in range(num_rows)
    ]
    with np.errstate(over="ignore", under="ignore"):
        values = np.stack(rows).astype(np.float32)
    at = st.tuples(st.integers(0, num_rows - 1), st.integers(0, inputs - 1))
    for place, value in draw(st.dictionaries(at, st.floats(width=32), max_size=3)).items():
        values[place] = value
    return mx.array(values.reshape(*shape[:-1], inputs)).astype(draw(st.sampled_from(FLOATS)))


kinds, group_sizes = st.sampled_from(sorted(QUANTIZE)), st.sampled_from(GROUP_SIZES)


@given(st.data())
def check_floats(data: st.DataObject) -> None:
    group_size = data.draw(group_sizes)
    check_same(data.draw(kinds), [data.draw(weights(group_size))], group_size)


@given(st.data())
def check_affine(data: st.DataObject) -> None:
    kind, group_size = data.draw(kinds), data.draw(group_sizes)
    scales = data.draw(weights(32))[..., : data.draw(st.integers(1, 4))]
    biases = -scales * data.draw(st.sampled_from([0, 1, 7.5, 128]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    shape = (*scales.shape[:-1], scales.shape[-1] * group_size * BITS[kind] // 32)
    codes = mx.array(rng.integers(0, 2**32, shape, dtype=np.uint32))
    check_same(kind, [codes, scales, biases.astype(scales.dtype)], group_size)


def check_layers() -> None:
    rng, threads = np.random.default_rng(7), _ext.threads()
    for kind in QUANTIZE:
        for dtype in FLOATS:
            wide = mx.array(rng.standard_normal((256, 700)) * 0.02).astype(dtype)
            for weight in (wide[:, :640], wide.T, mx.stack([wide[:, :128], wide[:, 128:256]])):
                affine = mx.quantize(weight, 64, BITS[kind])
                for count in (1, 2, 5):
                    _ext.set_threads(count)
                    check_same(kind, [weight], 64)
                    check_same(kind, affine, 64)
    _ext.set_threads(threads)


def run(*checks: Callable[[], None]) -> None:
    settled = settings(
        max_examples=60,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    for check in checks:
        settled(check)()


def main() -> None:
    run(check_floats, check_affine)
    check_layers()
    print("checked", _ext.isa())
