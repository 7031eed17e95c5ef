"""Checks of adapter products at one instruction set, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from octavo.kernels import _ext

RANKS = (1, 4, 7, 16, 33)
SIZES = ((64, (48,)), (100, (70, 530)), (1024, (512, 16, 1000)))
TYPES = (
    (mx.float32, mx.float32),
    (mx.bfloat16, mx.bfloat16),
    (mx.float16, mx.float32),
    (mx.float32, mx.bfloat16),
)


def wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype, scale: float = 1.0) -> mx.array:
    return mx.array((rng.normal(size=shape) * scale).astype(np.float32)).astype(dtype)


class Layer:
    def __init__(
        self, rng: np.random.Generator, inputs: int, outputs: tuple[int, ...], dtype: mx.Dtype,
        experts: int = 1, gain: bool = False,
    ) -> None:  # fmt: skip
        self.outputs, self.experts, self.inputs = outputs, experts, inputs
        self.table = _ext.AdapterTable(inputs, outputs, experts, len(RANKS))
        self.factors: dict[tuple[int, int], Any] = {}
        for slot, rank in enumerate(RANKS, 1):
            for part, count in enumerate(outputs):
                if (slot + part) % 4 == 3:
                    continue
                a = normal(rng, (experts, rank, inputs), dtype, inputs**-0.5)
                b = normal(rng, (experts, rank, count), dtype, rank**-0.5)
                g = normal(rng, (count,), mx.float32) if gain else None
                bias = normal(rng, (count,), mx.float32) if gain and slot % 2 else None
                made = _ext.adapter_factors(a, b, scale=0.5 * slot, gain=g, bias=bias)
                self.table.put(slot, part, made)
                self.factors[slot, part] = (
                    wide(a), wide(b), 0.5 * slot, 1 if g is None else wide(g),
                    0 if bias is None else wide(bias),
                )  # fmt: skip

    def expected(self, y: np.ndarray, x: np.ndarray, slots: np.ndarray, ids: np.ndarray) -> np.ndarray:
        want = y.copy()
        for row, (slot, expert) in enumerate(zip(slots, ids, strict=True)):
            start = 0
            for part, count in enumerate(self.outputs):
                if (found := self.factors.get((slot, part))) is not None:
                    a, b, scale, gain, bias = found
                    each = want[row, start : start + count]
                    each[:] = gain * (each - bias + scale * (x[row] @ a[expert].T) @ b[expert]) + bias
                start += count
        return want


def check_linear() -> None:
    rng = np.random.default_rng(0)
    for inputs, outputs in SIZES:
        for x_type, factor_type in TYPES:
            for gain in (False, True):
                layer = Layer(rng, inputs, outputs, factor_type, gain=gain)
                check_rows(rng, layer, x_type, num_rows=45)


def check_rows(rng: np.random.Generator, layer: Layer, x_type: mx.Dtype, num_rows: int) -> None:
    slots = rng.integers(0, len(RANKS) + 1, num_rows).astype(np.int32)
    slots[10:35] = 4
    x = normal(rng, (num_rows, 1, layer.inputs), x_type)
    y = normal(rng, (num_rows, 1, sum(layer.outputs)), x_type)
    given = mx.array(slots).reshape(-1, 1, 1)
    got = _ext.add_adapters(y, x, given, layer.table)
    assert got.dtype == x_type
    want = layer.expected(wide(y)[:, 0], wide(x)[:, 0], slots, np.zeros(num_rows, np.int32))
    rounding = {mx.float32: 3e-6, mx.bfloat16: 2**-8, mx.float16: 2**-11}[x_type]
    np.testing.assert_allclose(wide(got)[:, 0], want, rtol=rounding, atol=8e-6)
    base = np.flatnonzero(slots == 0)
    assert mx.array_equal(got[mx.array(base)], y[mx.array(base)]), "a row without an adapter has changed"
    before = _ext.threads()
    for threads, parts in (
        (1, [(0, num_rows)]),
        (2, [(i, i + 1) for i in range(num_rows)]),
        (2, [(0, 13), (13, 45)]),
    ):
        _ext.set_threads(threads)
        again = [_ext.add_adapters(y[i:j], x[i:j], given[i:j], layer.table) for i, j in parts]
        assert mx.array_equal(got, mx.concatenate(again)), "bits depend on threads or neighbours"
    _ext.set_threads(before)


def check_experts() -> None:
    rng = np.random.default_rng(1)
    num_experts, top = 3, 2
    for x_type, factor_type in TYPES:
        layer = Layer(rng, 64, (96,), factor_type, experts=num_experts)
        slots = rng.integers(0, len(RANKS) + 1, (20, 1, 1)).astype(np.int32)
        ids = rng.integers(0, num_experts, (20, 1, top)).astype(np.int32)
        x = normal(rng, (20, 1, 1, 1, 64), x_type)
        y = normal(rng, (20, 1, top, 1, 96), x_type)
        places = mx.array(slots * num_experts + ids)
        got = _ext.add_expert_adapters(y, x, places, layer.table)
        rows = np.repeat(wide(x).reshape(20, 64), top, axis=0)
        want = layer.expected(wide(y).reshape(-1, 96), rows, np.repeat(slots.ravel(), top), ids.ravel())
        np.testing.assert_allclose(wide(got).reshape(-1, 96), want, rtol=2**-8, atol=8e-6)
        for row in range(20):
            alone = _ext.add_expert_adapters(
                y[row : row + 1], x[row : row + 1], places[row : row + 1], layer.table
            )
            assert mx.array_equal(alone, got[row : row + 1])


def main() -> None:
    check_linear()
    check_experts()
    print(f"checked {_ext.isa()}")


if __name__ == "__main__":
    main()
