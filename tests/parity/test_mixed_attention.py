"""Attention over quantized pages and 16-bit twins against float64, on a shape grid and both backends."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from attention_backends import BACKENDS, TestedBackend, poison
from attention_cases import CASES, Case, build_metadata
from mixed_cases import run_mixed, twin_spec
from octavo.kernels.interface import LayerSpec, PoolSpec
from octavo.kernels.residual import MixedPool, check_twins

CASE_NAMES = (
    "mixed-page1", "mixed-page8", "decode-page16", "mixed-page32", "mixed-page64", "group5", "dim80",
    "dim128", "value-wider", "one-token", "one-chunk", "long-decode", "chunk-over-long", "window5",
    "window17", "window40", "keep4", "keep20", "sinks", "sinks-window", "softcap", "everything",
    "mask-seen per head", "mask-added", "slopes-window",
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
        pool = backend.create().create_mixed_pool(spec, twin_spec(case, spec, window=window, keep=keep))
        assert isinstance(pool, MixedPool)
        for part in (pool.quantized, pool.twins):
            poison(part)
        got, want = run_mixed(case, pool, [after] * len(case.sequences))
        np.testing.assert_allclose(got, want, rtol=0, atol=backend.tolerance * np.abs(want).max())


def test_sequences_may_be_quantized_after_different_numbers_of_tokens() -> None:
    case = Case(name="each its own", page_size=4, sequences=((30, 1), (30, 1), (0, 30), (20, 9)))
    spec = case.spec("fp4", "fp4")
    for backend in BACKENDS:
        pool = backend.create().create_mixed_pool(spec, twin_spec(case, spec, window=1, keep=0))
        assert isinstance(pool, MixedPool)
        got, want = run_mixed(case, pool, [0, 31, 16, 24])
        np.testing.assert_allclose(got, want, rtol=0, atol=backend.tolerance * np.abs(want).max())


def test_with_every_row_read_from_its_twin_results_are_those_of_16_bit_pages() -> None:
    case = Case(name="all twins", sequences=((40, 1), (0, 33), (20, 9)))
    quantized, plain = case.spec("fp4", "fp4"), case.spec("bf16", "bf16")
    for backend in BACKENDS:
        twins = twin_spec(case, quantized, window=1, keep=100)
        pool = backend.create().create_mixed_pool(quantized, twins)
        assert isinstance(pool, MixedPool)
        kept, _ = run_mixed(case, pool, [0] * 3)
        same = backend.create().create_mixed_pool(replace(plain, num_pages=quantized.num_pages), twins)
        assert isinstance(same, MixedPool)
        dense, _ = run_mixed(case, same, [0] * 3)
        np.testing.assert_allclose(kept, dense, rtol=0, atol=1e-6)


def test_twins_that_fit_no_pages_are_refused() -> None:
    layer = LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64)
    spec = PoolSpec(layers=(layer,), num_pages=4, page_size=16, k_format="fp4", v_format="fp4")
    twins = replace(spec, layers=(replace(layer, window=1),), k_format="bf16", v_format="fp16")
    check_twins(spec, twins)
    windowed = replace(spec, layers=(replace(layer, window=8, keep=3),))
    for wrong, of, message in (
        (replace(twins, v_format="int8"), spec, "16-bit format"),
        (replace(twins, page_size=32), spec, "page size"),
        (replace(twins, layers=spec.layers), spec, "need a window"),
        (replace(twins, layers=(replace(layer, window=9, keep=3),)), windowed, "at most the layer's 8"),
        (twins, windowed, "must keep its 3, got 0"),
        (
            replace(twins, layers=(replace(layer, window=1, head_dim=32),)),
            spec,
            r"must have them too, got \(2, 32",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            check_twins(of, wrong)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_rows_that_neither_kind_can_store_are_reported(backend: TestedBackend) -> None:
    """2^127 fits 16 bits; the sums of its rotation do not fit a float."""
    case = Case(name="one chunk", sequences=((0, 6),))
    spec = case.spec("fp4", "fp4")
    pool = backend.create().create_mixed_pool(spec, twin_spec(case, spec, window=1, keep=0))
    step = build_metadata(case.sequences, [np.arange(1, dtype=np.int32)], case.page_size)
    keys, values = np.ones((2, 6, 2, 64), np.float32)
    keys[2, 0, 5], values[4] = np.nan, 2.0**127
    pool.begin_step(replace(step, others=(step,)))
    pool.write(0, mx.array(keys), mx.array(values))
    mx.eval(*pool.pending())
    assert pool.nonfinite_tokens() == [2, 4]
    for message, ask in (
        ("cannot be gathered", lambda: pool.gather(0)),
        ("of one kind", lambda: pool.read_pages([0])),
        ("of one kind", lambda: pool.copy_pages([(0, 1)])),
        ("no one size", lambda: pool.spec),
    ):
        with pytest.raises(ValueError, match=message):
            ask()
