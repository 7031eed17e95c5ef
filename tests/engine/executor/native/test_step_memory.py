from __future__ import annotations

import mlx.core as mx
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


def test_kept_memory_is_bounded() -> None:
    x = ones(512)
    live = [silu(x) for _ in range(KEPT // x.nbytes + 8)]
    del live
    mx.synchronize()
    assert KEPT - x.nbytes <= _ext.kept_bytes() <= KEPT
