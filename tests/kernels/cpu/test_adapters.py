from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from native import at_every_level, require_extension, run_at_level

pytestmark = pytest.mark.parity

_ext = require_extension()

import adapter_checks  # noqa: E402  it imports the extension


@at_every_level
def test_products_are_those_of_numpy_at_every_level(level: str) -> None:
    assert run_at_level(level, "import adapter_checks; adapter_checks.main()").strip() == f"checked {level}"


def factors(rank: int = 4, inputs: int = 32, outputs: int = 48, experts: int = 1) -> Any:
    rng = np.random.default_rng(rank)
    a = adapter_checks.normal(rng, (experts, rank, inputs), mx.float32)
    b = adapter_checks.normal(rng, (experts, rank, outputs), mx.float32)
    return _ext.adapter_factors(a, b, scale=1.0)


def rows(slot: int, count: int = 3) -> tuple[mx.array, mx.array, mx.array]:
    rng = np.random.default_rng(9)
    y, x = (adapter_checks.normal(rng, (count, 1, size), mx.float32) for size in (48, 32))
    return y, x, mx.full((count, 1, 1), slot, mx.int32)


def test_a_slot_can_be_changed_between_two_steps() -> None:
    table = _ext.AdapterTable(32, [48], 1, 2)
    y, x, slots = rows(2)
    assert mx.array_equal(_ext.add_adapters(y, x, slots, table), y)
    table.put(2, 0, factors(4))
    first = _ext.add_adapters(y, x, slots, table)
    mx.eval(first)
    table.put(2, 0, factors(7))
    second = _ext.add_adapters(y, x, slots, table)
    mx.eval(second)
    table.clear(2)
    assert mx.array_equal(_ext.add_adapters(y, x, slots, table), y)
    assert not mx.array_equal(first, y)
    assert not mx.array_equal(first, second)


def test_an_array_that_others_read_is_not_written_to() -> None:
    table = _ext.AdapterTable(32, [48], 1, 1)
    table.put(1, 0, factors())
    y, x, slots = rows(1)
    product = y * 2
    both = [_ext.add_adapters(product, x, slots, table), product + 0]
    mx.eval(both)
    assert mx.array_equal(both[1], y * 2)


def test_factors_have_no_padding_of_their_rank() -> None:
    assert factors(rank=1).nbytes == 4 * (32 + 48)
    assert factors(rank=5, inputs=33).nbytes == 4 * 5 * (48 + 48)  # rows are padded to whole vectors


def test_slots_that_do_not_exist_are_refused() -> None:
    table = _ext.AdapterTable(32, [48], 1, 2)
    with pytest.raises(ValueError, match=r"slot must be between 1 and 2 .* got 3"):
        table.put(3, 0, factors())
    with pytest.raises(ValueError, match="slot must be between 1 and 2, got 0"):
        table.clear(0)


def test_factors_of_another_layer_are_refused() -> None:
    table = _ext.AdapterTable(32, [48], 1, 2)
    with pytest.raises(ValueError, match=r"factors must be of 1 matrices \[48, 32\]"):
        table.put(1, 0, factors(inputs=64))
    with pytest.raises(ValueError, match="a and b must have shapes"):
        _ext.adapter_factors(mx.zeros((1, 4, 32)), mx.zeros((1, 5, 48)), scale=1.0)
    with pytest.raises(ValueError, match="must both be bfloat16 or float32"):
        _ext.adapter_factors(mx.zeros((1, 4, 32), mx.float16), mx.zeros((1, 4, 48)), scale=1.0)


def test_rows_without_a_slot_each_are_refused() -> None:
    table = _ext.AdapterTable(32, [48], 1, 2)
    y, x, _ = rows(1, count=3)
    with pytest.raises(ValueError, match="slots must be int32, one for each row"):
        _ext.add_adapters(y, x, mx.zeros((2, 1, 1), mx.int32), table)
    with pytest.raises(ValueError, match="x and y must be floats"):
        _ext.add_adapters(y, x[..., :16], mx.zeros((3, 1, 1), mx.int32), table)
