"""AVX2's fixed-point products of bf16 weights, compared with the formula in NumPy, to the bit.

The formula is in kernels/csrc/linear/fixed_avx2.cpp: codes in groups of 128 inputs, exact integer sums,
then float32 sums over the groups in order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from octavo.kernels import _ext

GROUP = 128
Floats = NDArray[np.float64]

# Incomplete groups, pairs and panels; one input, one output, one row; more rows than one work item.
SHAPES = ((64, 128), (1, 1), (7, 33), (100, 610), (65, 160), (130, 300))
ROWS = (1, 2, 3, 6, 7, 20, 97)


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes [rows, groups, 128] and steps [rows, groups]; codes after the last input are 0."""

    codes: NDArray[np.int64]
    steps: Floats


def grouped(values: Floats) -> Floats:
    rows, inputs = values.shape
    padded = np.pad(values, ((0, 0), (0, -inputs % GROUP)))
    return padded.reshape(rows, -1, GROUP)


def rounded(groups: Floats, exponents: Floats) -> Codes:
    """Return codes of ``groups``. The step of each group is 2^-exponent, or 2^-126 if that is larger."""
    factors = 2.0 ** np.minimum(exponents, 126)
    return Codes(np.rint(groups * factors[..., None]).astype(np.int64), 1 / factors)


def weight_codes(weight: Floats) -> Codes:
    """Return codes q; each group has the smallest step with sum|q| < 2^17 and |q| < 2^15."""
    groups = grouped(weight)
    with np.errstate(divide="ignore"):
        most = np.minimum(130944 / np.abs(groups).sum(-1), 32767 / np.abs(groups).max(-1))
        return rounded(groups, np.floor(np.log2(most)))


def activation_codes(x: Floats) -> Codes:
    """Return codes xq; the step of each group is chosen so that 2^13 <= max|xq| < 2^14."""
    groups = grouped(x)
    with np.errstate(divide="ignore"):
        return rounded(groups, 13 - np.floor(np.log2(np.abs(groups).max(-1))))


def product(x: Floats, weight: Floats) -> NDArray[np.float32]:
    """Return the expected result before it is rounded to bf16."""
    a, w = activation_codes(x), weight_codes(weight)
    sums = np.zeros((len(x), len(weight)), np.float32)
    for group in range(a.codes.shape[1]):
        dots = a.codes[:, group].astype(np.float64) @ w.codes[:, group].T.astype(np.float64)  # exact
        assert np.abs(dots).max() < 2**31
        scaled = dots.astype(np.float32) * a.steps[:, None, group].astype(np.float32)
        sums = (scaled.astype(np.float64) * w.steps[:, group] + sums).astype(np.float32)
    return sums


def bound(x: Floats, weight: Floats) -> Floats:
    """Return the documented error bound of an unrounded result."""
    a, w = np.abs(grouped(x)), np.abs(grouped(weight))
    least = 2.0**-127
    weights = np.maximum(np.maximum(w.sum(-1) / 2**17, w.max(-1) / 2**15), least)
    result: Floats = np.maximum(a.max(-1) / 2**14, least) @ w.sum(-1).T + a.sum(-1) @ weights.T
    return 1.01 * result + 1e-6 * (np.abs(x) @ np.abs(weight).T)


def bf16(values: Floats | NDArray[np.float32]) -> mx.array:
    return mx.array(values.astype(np.float32)).astype(mx.bfloat16)


def wide(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def same_bits(one: mx.array, other: mx.array) -> bool:
    """Return whether the bits are equal; NaNs count as equal."""
    return bool(mx.array_equal(one.view(mx.uint16), other.view(mx.uint16)))


def spreads(rng: np.random.Generator, shape: tuple[int, int]) -> list[Floats]:
    """Return normal values, heavy tails, outliers, mostly zeros, tiny and large values, subnormals."""
    plain = rng.standard_normal(shape)
    outlier = np.where(np.arange(shape[1]) % 50 == 7, 100.0, 1.0)
    rare = np.where(rng.random(shape) < 0.02, plain, 0)
    return [plain, plain**5, plain * outlier, rare, plain * 1e-30, plain * 1e15, plain * 1e-39]


def check_bits() -> None:
    rng = np.random.default_rng(0)
    num_unlike = 0
    for outputs, inputs in SHAPES:
        weights = spreads(rng, (outputs, inputs))
        activations = spreads(rng, (max(ROWS), inputs))
        for number, values in enumerate(weights):
            weight, x = bf16(values), bf16(activations[(number + inputs) % len(activations)])
            packed = _ext.pack_dense(weight)
            expected = bf16(product(wide(x), wide(weight)))
            for count in ROWS:
                y = _ext.linear(x[:count], packed)
                assert same_bits(y, expected[:count]), (outputs, inputs, count)
            num_unlike += int((_ext.linear(x, packed, exact=True) != expected).sum())
            error = np.abs(wide(expected) - wide(x) @ wide(weight).T)
            assert (error <= bound(wide(x), wide(weight)) + 2**-8 * np.abs(wide(expected)) + 1e-38).all()
    assert num_unlike > 100


def check_extremes() -> None:
    """Sums next to 2^31 do not wrap; small integers are exact."""
    most = 1.9921875
    lone = np.zeros(256)
    lone[[3, 200]] = most
    full = np.full(256, most)
    weight = bf16(np.stack([full, -full, lone, -lone, np.where(np.arange(256) % 2, full, -full)]))
    x = bf16(np.stack([full, -full, lone, full * 2.0**60]))
    y = _ext.linear(x, _ext.pack_dense(weight))
    assert same_bits(y, bf16(wide(x) @ wide(weight).T))
    codes = weight_codes(wide(weight)).codes
    assert 0.99 * 2**17 < np.abs(codes).sum(-1).max() < 2**17
    assert np.abs(codes).max() == 255 * 2**7
    rng = np.random.default_rng(1)
    small, few = rng.integers(-8, 9, (70, 500)), rng.integers(-1, 2, (9, 500))
    y = _ext.linear(bf16(few.astype(float)), _ext.pack_dense(bf16(small.astype(float))))
    assert same_bits(y, bf16((few @ small.T).astype(float)))


def check_not_finite() -> None:
    """A row with an infinite, NaN or too large value gives NaN; other rows do not."""
    rng = np.random.default_rng(2)
    dense = bf16(rng.standard_normal((70, 300)))
    packed = _ext.pack_dense(dense)
    plain = rng.standard_normal((9, 300))
    clean = _ext.linear(bf16(plain), packed)
    for bad, at in itertools.product((np.nan, np.inf, -np.inf, 2.0**110), (0, 150, 299)):
        x = plain.copy()
        x[4, at] = bad
        y = _ext.linear(bf16(x), packed)
        assert mx.isnan(y[4]).all()
        assert same_bits(y[:4], clean[:4])
        assert same_bits(y[5:], clean[5:])
        assert mx.isnan(_ext.linear(bf16(x[4:5]), packed)).all()
    # Weights that do not fit in integers use the float kernel for every row.
    for bad in (np.nan, np.inf, 2.0**120):
        weight = dense[:]
        weight[5, 7] = bad
        packed = _ext.pack_dense(weight)
        y = _ext.linear(bf16(plain), packed)
        assert same_bits(y, _ext.linear(bf16(plain), packed, exact=True))
        assert bool(mx.isnan(y[:, 5]).all()) == bool(np.isnan(bad))
        assert same_bits(y[:, 6:], _ext.linear(bf16(plain), _ext.pack_dense(dense), exact=True)[:, 6:])


def check_magnitudes() -> None:
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((5, 200)), rng.standard_normal((70, 200))
    for shift in (0, 60, 100, 107, -60, -100, -103):
        up, down = bf16(x * 2.0**shift), bf16(weight * 2.0**-shift)
        assert same_bits(_ext.linear(up, _ext.pack_dense(down)), bf16(product(wide(up), wide(down)))), shift
        limit = 2**-8 * np.abs(x @ weight.T).max()
        assert np.abs(wide(_ext.linear(up, _ext.pack_dense(down))) - x @ weight.T).max() < 2 * limit


def main() -> None:
    mx.set_default_device(mx.cpu)
    assert _ext.isa() == "avx2"
    for check in (check_bits, check_extremes, check_not_finite, check_magnitudes):
        check()
    print("checked")


if __name__ == "__main__":
    main()
