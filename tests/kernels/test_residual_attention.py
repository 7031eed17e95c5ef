from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from attention_backends import BACKENDS, TestedBackend, poison
from attention_cases import CASES, Case, as_numpy, build_metadata
from octavo.kernels.interface import LayerSpec, PoolSpec
from octavo.kernels.residual import check_residual
from residual_cases import residual_spec, run_residual, starts_of

pytestmark = pytest.mark.parity

CASE_NAMES = (
    "mixed-page1", "mixed-page8", "decode-page16", "mixed-page32", "mixed-page64", "group5", "dim80",
    "dim128", "value-wider", "one-token", "one-chunk", "long-decode", "chunk-over-long", "window5",
    "window17", "window40", "keep4", "keep20", "sinks", "sinks-window", "softcap", "everything",
    "mask-seen per head", "mask-added", "whole", "whole-window",
)  # fmt: skip
SOME = [case for case in CASES if case.name in CASE_NAMES]
PAIRS = [
    *((case, ("fp4", "fp4")) for case in SOME),
    *(
        (case, ("int8", "nvfp4"))
        for case in SOME
        if case.name in ("mixed-page32", "everything", "long-decode")
    ),
    *((case, ("bf16", "int4")) for case in SOME if case.name == "everything"),
]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize(("case", "formats"), PAIRS, ids=lambda value: getattr(value, "name", None))
def test_rows_read_each_position_from_the_kind_of_page_they_should(
    case: Case, backend: TestedBackend, formats: tuple[str, str]
) -> None:
    spec = case.spec(*formats)
    for window, keep, after in ((1, 0, 0), (1, 5, 0), (case.page_size + 1, 1, 40), (2, 0, 10**6)):
        pool = backend.create().create_residual_pool(
            spec, residual_spec(case, spec, window=window, keep=keep)
        )
        for part in pool.storages:
            poison(part)
        got, want = run_residual(case, pool, [after] * len(case.sequences))
        np.testing.assert_allclose(got, want, rtol=0, atol=backend.tolerance * np.abs(want).max())


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_long_chunks_of_16_bit_rows_read_the_pages_they_should(
    page_size: int, backend: TestedBackend
) -> None:
    case = Case(name="chunks", page_size=page_size, sequences=((0, 150), (75, 101)))
    spec = case.spec("fp4", "fp4")
    for window in (1, page_size + 1, 2 * page_size):
        pool = backend.create().create_residual_pool(spec, residual_spec(case, spec, window=window, keep=0))
        for part in pool.storages:
            poison(part)
        got, want = run_residual(case, pool, [0, 0], dtype=mx.bfloat16)
        np.testing.assert_allclose(got, want, rtol=0, atol=0.02 * np.abs(want).max())


def test_sequences_may_be_quantized_after_different_numbers_of_tokens() -> None:
    case = Case(name="each its own", page_size=4, sequences=((30, 1), (30, 1), (0, 30), (20, 9)))
    spec = case.spec("fp4", "fp4")
    for backend in BACKENDS:
        pool = backend.create().create_residual_pool(spec, residual_spec(case, spec, window=1, keep=0))
        got, want = run_residual(case, pool, [0, 31, 16, 24])
        np.testing.assert_allclose(got, want, rtol=0, atol=backend.tolerance * np.abs(want).max())


def test_with_every_row_read_from_its_residual_page_results_are_those_of_16_bit_pages() -> None:
    case = Case(name="all residual", sequences=((40, 1), (0, 33), (20, 9)))
    quantized, plain = case.spec("fp4", "fp4"), case.spec("bf16", "bf16")
    for backend in BACKENDS:
        residual = residual_spec(case, quantized, window=1, keep=100)
        pool = backend.create().create_residual_pool(quantized, residual)
        kept, _ = run_residual(case, pool, [0] * 3)
        same = backend.create().create_residual_pool(replace(plain, num_pages=quantized.num_pages), residual)
        dense, _ = run_residual(case, same, [0] * 3)
        np.testing.assert_allclose(kept, dense, rtol=0, atol=1e-6)


def test_residual_pages_that_fit_no_pages_are_refused() -> None:
    layer = LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64)
    spec = PoolSpec(layers=(layer,), num_pages=4, page_size=16, k_format="fp4", v_format="fp4")
    residual = replace(spec, layers=(replace(layer, window=1),), k_format="bf16", v_format="fp16")
    check_residual(spec, residual)
    windowed = replace(spec, layers=(replace(layer, window=8, keep=3),))
    for wrong, of, message in (
        (replace(residual, v_format="int8"), spec, "16-bit format"),
        (replace(residual, page_size=32), spec, "page size"),
        (replace(residual, layers=spec.layers), spec, "must have a window"),
        (replace(residual, layers=(replace(layer, window=9, keep=3),)), windowed, "at most the layer's 8"),
        (residual, windowed, "must have its keep of 3, got 0"),
        (
            replace(residual, layers=(replace(layer, window=1, head_dim=32),)),
            spec,
            r"must have rows of .* \(heads, K, V\), got \(2, 32",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            check_residual(of, wrong)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_rows_that_neither_kind_can_store_are_reported(backend: TestedBackend) -> None:
    """2^127 fits 16 bits; the sums of its rotation overflow a float."""
    case = Case(name="one chunk", sequences=((0, 6),))
    spec = case.spec("fp4", "fp4")
    pool = backend.create().create_residual_pool(spec, residual_spec(case, spec, window=1, keep=0))
    step = build_metadata(case.sequences, [np.arange(1, dtype=np.int32)], case.page_size)
    keys, values = np.ones((2, 6, 2, 64), np.float32)
    keys[2, 0, 5], values[4] = np.nan, 2.0**127
    pool.begin_step(replace(step, groups=step.groups * 2))
    pool.write(0, mx.array(keys), mx.array(values))
    mx.eval(*pool.pending())
    assert pool.nonfinite_tokens() == [2, 4]


def test_a_step_of_another_number_of_groups_is_refused() -> None:
    case = Case(name="one chunk", sequences=((0, 6),))
    spec = case.spec("fp4", "fp4")
    cache = BACKENDS[0].create().create_residual_pool(spec, residual_spec(case, spec, window=1, keep=0))
    step = build_metadata(case.sequences, [np.arange(1, dtype=np.int32)], case.page_size)
    with pytest.raises(ValueError, match="residual pages, got 1 groups"):
        cache.begin_step(step)
    with pytest.raises(ValueError, match="call begin_step first"):
        cache.gather(0)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_gathered_rows_come_from_the_pages_that_each_query_reads(backend: TestedBackend) -> None:
    case = Case(name="", sequences=((0, 40), (0, 3)), page_size=8)
    spec = case.spec("int8", "int8")
    beside_spec = residual_spec(case, spec, window=1, keep=8)
    cache = backend.create().create_residual_pool(spec, beside_spec)
    rng = np.random.default_rng(0)
    tables = [np.array([3, 1, 4, 0, 5], np.int32), np.array([2], np.int32)]
    beside = [table[::-1].copy() if len(table) > 1 else table for table in tables]
    step = build_metadata(case.sequences, tables, 8)
    shown = build_metadata(case.sequences, beside, 8).only_group()
    starts = starts_of(step, beside_spec.layers[0], np.array([12, 0], np.int32))
    step = replace(step, groups=(*step.groups, shown._replace(starts=starts)))
    keys, values = (mx.array(rng.standard_normal((43, 2, 64)).astype(np.float32)) for _ in range(2))
    cache.begin_step(step)
    cache.write(0, keys, values)
    dense = cache.gather(0)
    mx.eval(*dense, *cache.pending())
    for gathered, rows in zip(dense, (keys, values), strict=True):
        got, exact = as_numpy(gathered), as_numpy(rows.astype(mx.bfloat16))[:40].swapaxes(0, 1)
        assert got.shape == (43, 2, 40, 64)
        for row in (11, 12, 30, 39):
            first = 0 if row < 12 else row // 8 * 8
            equal = (got[row] == exact).all(axis=(0, 2))
            assert equal[:8].all(), "kept"
            assert equal[first:].all(), "the residual window, from the page of its first position on"
            assert not equal[8:first].any(), "what is quantized differs"
            np.testing.assert_allclose(got[row], exact, atol=0.05)
        assert not got[40:, :, 3:].any(), "past the end of the second sequence"
