from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from attention_backends import BACKENDS, TestedBackend, poison
from latent_cases import (
    CASES,
    Case,
    Data,
    history,
    last_step,
    metadata,
    relative_errors,
    residual_pool,
    residual_truth,
    spec_of,
)
from native import at_every_level, require_extension, run_at_level
from octavo.kernels.interface import AttendOptions, KVPool, LayerSpec, PoolSpec
from octavo.kernels.residual_cache import ResidualCache

pytestmark = pytest.mark.parity
CAN = [backend for backend in BACKENDS if backend.name in ("reference", "cpu")]
LIMITS = {"bf16": 0.01, "fp16": 0.01, "int8": 0.02, "fp4": 0.03, "fp5": 0.03}
"""Relative errors of a row: bf16 rounding of queries and results, or 8-bit arithmetic over 4-bit pages."""


def pool_of(backend: TestedBackend, case: Case, *formats: str) -> KVPool:
    pool = backend.create().create_pool(spec_of(case, *formats))
    if formats == ("bf16", "bf16"):
        poison(pool)
    return pool


def grid() -> Iterator[object]:
    pairs = (("bf16", "bf16"), ("fp16", "fp16"), ("int8", "int8"), ("fp4", "bf16"), ("fp5", "fp4"))
    for number, name in enumerate(CASES):
        long = name in ("long", "many heads")
        for formats in (pairs[0], pairs[-1]) if long else (pairs[number % 5], pairs[(number + 2) % 5]):
            yield pytest.param(name, formats, id=f"{name}-{'/'.join(formats)}")


@pytest.mark.parametrize(("name", "formats"), list(grid()))
@pytest.mark.parametrize("backend", CAN, ids=lambda backend: backend.name)
def test_latents_equal_truth(backend: TestedBackend, name: str, formats: tuple[str, str]) -> None:
    error = largest_error(backend, CASES[name], formats)
    assert error < LIMITS[formats[0]] + LIMITS[formats[1]], error


def largest_error(backend: TestedBackend, case: Case, formats: tuple[str, str]) -> float:
    data, pool = Data(case), pool_of(backend, case, *formats)
    data.step(pool, history(case))
    got = data.step(pool, last_step(case))
    wanted = data.truth(pool, last_step(case))
    return float(relative_errors(got, wanted).max())


AT_LEVEL = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_latent_attention as tests
from octavo.kernels import _ext
backend = tests.BACKENDS[-1]
print(_ext.isa(), *(tests.largest_error(backend, case, ("bf16", "bf16")) for case in tests.CASES.values()))
"""


@at_every_level
def test_every_instruction_set_equals_truth(level: str) -> None:
    require_extension()
    name, *errors = run_at_level(level, AT_LEVEL).split()
    assert name == level
    assert len(errors) == len(CASES)
    assert all(float(error) < 2 * LIMITS["bf16"] for error in errors), errors


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.window is None])
def test_a_mask_that_hides_nothing_changes_no_bit(name: str) -> None:
    require_extension()
    case, work = CASES[name], last_step(CASES[name])
    backend = next(chosen for chosen in BACKENDS if chosen.name == "cpu")
    data, pool = Data(case), pool_of(backend, case, "fp16", "fp16")
    data.write(pool, history(case))
    positions = np.concatenate([np.arange(start, stop) for _, start, stop in work])
    seen = mx.array(np.arange(positions.max() + 1) <= positions[:, None])
    plain, masked = (data.step(pool, work, mx.float32, mask) for mask in (None, seen))
    assert np.array_equal(plain, masked)


@pytest.mark.parametrize("name", ["many heads", "long"])
@pytest.mark.parametrize("formats", [("bf16", "bf16"), ("int8", "bf16")], ids="/".join)
def test_no_bit_depends_on_how_heads_are_shared_out(name: str, formats: tuple[str, str]) -> None:
    ext = require_extension()
    case = CASES[name]
    backend = next(chosen for chosen in BACKENDS if chosen.name == "cpu")
    data, pool = Data(case), pool_of(backend, case, *formats)
    data.step(pool, history(case))
    before, rows = ext.threads(), []
    try:
        for threads in (1, 3, 16):
            ext.set_threads(threads)
            rows.append(data.step(pool, last_step(case)))
    finally:
        ext.set_threads(before)
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


@pytest.mark.parametrize("name", ["mixed", "many heads", "small pages"])
@pytest.mark.parametrize("formats", [("bf16", "bf16"), ("fp4", "bf16")], ids="/".join)
def test_a_row_has_bit_identical_results_alone(name: str, formats: tuple[str, str]) -> None:
    backend = next(chosen for chosen in BACKENDS if chosen.name == "cpu")
    case = CASES[name]
    data, pool = Data(case), pool_of(backend, case, *formats)
    data.step(pool, history(case))
    together = data.step(pool, last_step(case))
    first = 0
    for i, old, stop in last_step(case):
        for p in range(old, stop):
            alone = data.step(pool, [(i, p, p + 1)])
            assert np.array_equal(alone[0], together[first]), (i, p)
            first += 1


@pytest.mark.parametrize(
    "name", ["mixed", "uneven tiles", "small pages", "odd dims", "decode", "window", "window of pages"]
)
@pytest.mark.parametrize("formats", [("fp4", "bf16"), ("int8", "fp4")], ids="/".join)
@pytest.mark.parametrize("backend", CAN, ids=lambda backend: backend.name)
def test_latents_of_two_kinds_of_pages(backend: TestedBackend, name: str, formats: tuple[str, str]) -> None:
    case = CASES[name]
    for window, keep in ((1, 0), (case.page_size + 1, case.page_size)):
        data, pool = Data(case), residual_pool(backend.create(), case, *formats, window=window, keep=keep)
        assert isinstance(pool, ResidualCache)
        data.write(pool, history(case))
        got = data.step(pool, last_step(case))
        error = relative_errors(got, residual_truth(data, pool, last_step(case))).max()
        assert error < LIMITS[formats[0]] + LIMITS[formats[1]], (window, keep, error)


@pytest.mark.parametrize("backend", CAN, ids=lambda backend: backend.name)
def test_specs_that_latents_cannot_have_are_refused(backend: TestedBackend) -> None:
    layer = LayerSpec(num_kv_heads=2, head_dim=16, value_dim=8)
    pool = backend.create().create_pool(
        PoolSpec(layers=(layer,), num_pages=2, page_size=16, k_format="bf16", v_format="bf16")
    )
    pool.begin_step(metadata(Case(((0, 1),)), [(0, 0, 1)]))
    pool.write(0, mx.zeros((1, 2, 16)), mx.zeros((1, 2, 8)))
    with pytest.raises(ValueError, match="one KV head"):
        pool.attend(0, mx.zeros((1, 4, 16)), AttendOptions(scale=1.0, rotary=mx.zeros((1, 4, 8))))
