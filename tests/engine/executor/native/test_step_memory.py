from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from native import require_extension

pytestmark = pytest.mark.parity

_ext = require_extension()

KEPT = 128 << 20  # kKeptBytes of program/step_memory.h
ROW = 4096  # values of two bytes


def silu(x: mx.array) -> mx.array:
    y: mx.array = _ext.gated(x, None, "silu")
    mx.eval(y)
    return y


def ones(rows: int) -> mx.array:
    x = mx.ones((rows, ROW), mx.bfloat16)
    mx.eval(x)
    return x


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    mx.synchronize()
    _ext.release_kept()
    assert _ext.kept_bytes() == 0


def test_a_step_reuses_memory_of_the_previous_step() -> None:
    x = ones(256)
    y = silu(x)
    assert _ext.kept_bytes() == 0
    del y
    mx.synchronize()
    kept = _ext.kept_bytes()
    assert kept == x.nbytes
    y = silu(ones(250))
    assert _ext.kept_bytes() == 0
    del y
    mx.synchronize()
    assert _ext.kept_bytes() == kept


def test_results_that_live_never_share_memory() -> None:
    x = mx.arange(64 * ROW, dtype=mx.float32).reshape(64, ROW) / (64 * ROW)
    expected = np.array(silu(x))
    live = [silu(x) for _ in range(3)]
    for round_ in range(4):
        live[round_ % 3] = silu(-x)
        live.append(silu(x))
        assert all(np.array_equal(np.array(y), expected) for y in live[3:])


@pytest.mark.parametrize("rows", [4, 64, 512])  # blocks of 64 KiB, 1 MiB (one huge page each) and 8 MiB
def test_results_begin_at_a_cache_line(rows: int) -> None:
    live = [silu(mx.ones((rows, ROW), mx.float32)) for _ in range(3)]
    assert [np.array(y, copy=False).ctypes.data % 64 for y in live] == [0, 0, 0]
    assert all(np.array_equal(np.array(y), np.array(live[0])) for y in live)


def test_kept_memory_is_bounded() -> None:
    x = ones(512)
    live = [silu(x) for _ in range(KEPT // x.nbytes + 8)]
    del live
    mx.synchronize()
    assert KEPT - x.nbytes <= _ext.kept_bytes() <= KEPT


def test_unused_memory_is_freed() -> None:
    big, small = ones(512), ones(32)
    silu(big)
    for _ in range(200):
        silu(small)
    mx.synchronize()
    assert _ext.kept_bytes() >= big.nbytes
    for _ in range(4096):
        silu(small)
    mx.synchronize()
    assert 0 < _ext.kept_bytes() < big.nbytes
