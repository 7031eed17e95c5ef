"""Attention over quantized pages and 16-bit twins against float64, on a shape grid and both backends."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from attention_backends import BACKENDS, TestedBackend, poison
from attention_cases import CASES, Case, as_numpy, build_metadata, shuffled_tables
from octavo.kernels.interface import LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata, Ints
from octavo.kernels.mixed import MixedPool, check_twins, twin_starts
from octavo.kernels.truth import StoredPart, dense_attention, sequence_slots


def twin_spec(case: Case, spec: PoolSpec, *, window: int, keep: int) -> PoolSpec:
    """As an engine makes them: a layer with a window keeps what it keeps."""
    keep = keep if case.window is None else case.keep
    layer = replace(case.layer, window=min(window, case.window or window), keep=keep)
    return replace(spec, layers=(layer,), k_format="bf16", v_format="bf16", num_pages=spec.num_pages + 3)


def with_gaps(table: Ints, case: Case, first: int, twins: PoolSpec, after: int) -> Ints:
    """A sequence's twins as they are when queries from position ``first`` on come: the others are given
    back, and their entries are 0."""
    (layer,), size = twins.layers, case.page_size
    assert layer.window is not None
    outer = first - (case.window or first + 1) + 1  # what the layer itself sees
    start = outer if first < after else max(outer, first - layer.window + 1)
    kept, shown = -(-layer.keep // size), max(start, 0) // size
    gaps = table.copy()
    gaps[kept : max(kept, shown)] = 0
    return gaps


def run_mixed(
    case: Case, pool: MixedPool, after: list[int], *, dtype: mx.Dtype = mx.float32
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Write every row of a case in two steps, attend in the last; what came out, and the truth."""
    rng = np.random.default_rng(3)
    specs = pool.quantized.spec, pool.twins.spec
    tables = [shuffled_tables(case, rng, spec.num_pages) for spec in specs]
    sinks = rng.standard_normal(case.kv_heads * case.group).astype(np.float32) if case.sinks else None
    parts = [[_empty(case, spec, part) for part in (0, 1)] for spec in specs]
    numbers = np.array(after, np.int32)
    for sequences in ([(0, old) for old, _ in case.sequences], case.sequences):
        members = [b for b, (_, new) in enumerate(sequences) if new]
        if not members:
            continue
        whole = [build_metadata(sequences, some, case.page_size) for some in tables]
        gaps = [
            with_gaps(table, case, old, specs[1], number)
            for table, (old, _), number in zip(tables[1], sequences, after, strict=True)
        ]
        shown = build_metadata(sequences, gaps, case.page_size)
        step = replace(whole[0], quantize_after=numbers[members], others=(shown,))
        tokens = step.num_tokens
        queries, keys, values = (
            mx.array(rng.standard_normal((tokens, heads, dim)).astype(np.float32)).astype(dtype)
            for heads, dim in (
                (case.kv_heads * case.group, case.head_dim),
                (case.kv_heads, case.head_dim),
                (case.kv_heads, case.layer.value_dim),
            )
        )
        pool.begin_step(step)
        pool.write(0, keys, values)
        out = pool.attend(
            0,
            queries,
            scale=case.head_dim**-0.5,
            sinks=None if sinks is None else mx.array(sinks),
            softcap=case.softcap,
        )
        mx.eval(out, *pool.pending())
        assert pool.nonfinite_tokens() == []
        assert out.dtype == dtype
        for stored, metadata in zip(parts, whole, strict=True):
            for part, rows in zip(stored, (keys, values), strict=True):
                part.write(metadata.slots, as_numpy(rows))
    want = _truth(case, specs, parts, (step, whole), as_numpy(queries), sinks)
    return as_numpy(out).astype(np.float64), want


def _empty(case: Case, spec: PoolSpec, part: int) -> StoredPart:
    return StoredPart.empty(
        (spec.k_format, spec.v_format)[part],
        num_pages=spec.num_pages,
        num_kv_heads=case.kv_heads,
        page_size=case.page_size,
        dim=(case.head_dim, case.layer.value_dim)[part],
    )


def _truth(
    case: Case,
    specs: tuple[PoolSpec, PoolSpec],
    parts: list[list[StoredPart]],
    steps: tuple[AttentionMetadata, list[AttentionMetadata]],
    queries: NDArray[np.float32],
    sinks: NDArray[np.float32] | None,
) -> NDArray[np.float64]:
    """Row by row: of each position, K and V of the kind that the row reads."""
    step, whole = steps
    assert step.quantize_after is not None
    layer = specs[1].layers[0]
    assert layer.window is not None
    out = np.empty((*queries.shape[:2], case.layer.value_dim))
    for b, length in enumerate(step.kv_len.tolist()):
        rows = [
            [part.read(sequence_slots(metadata, b, length)) for part in stored]
            for stored, metadata in zip(parts, whole, strict=True)
        ]
        for t in range(step.q_start[b], step.q_start[b + 1]):
            at = step.positions[t : t + 1]
            start = twin_starts(
                at, step.quantize_after[b : b + 1], window=layer.window, page_size=case.page_size
            )
            seen = np.arange(length)
            twin = ((seen >= start) | (seen < layer.keep))[:, None, None]
            keys, values = (np.where(twin, rows[1][part], rows[0][part]) for part in (0, 1))
            out[t : t + 1] = dense_attention(
                queries[t : t + 1],
                keys,
                values,
                at,
                scale=case.head_dim**-0.5,
                window=case.window,
                keep=case.keep,
                sinks=sinks,
                softcap=case.softcap,
            )
    return out


CASE_NAMES = (
    "mixed-page1", "mixed-page8", "decode-page16", "mixed-page32", "mixed-page64", "group5", "dim80",
    "dim128", "value-wider", "one-token", "one-chunk", "long-decode", "chunk-over-long", "window5",
    "window17", "window40", "keep4", "keep20", "sinks", "sinks-window", "softcap", "everything",
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
