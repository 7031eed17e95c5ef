"""Cases of attention over quantized and residual pages, with float64 results."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from attention_cases import Case, Extras, as_numpy, build_metadata, shuffled_tables, with_whole
from octavo.kernels.interface import AttendOptions, LayerSpec, PagedKVCache, PoolSpec
from octavo.kernels.metadata import AttentionMetadata, Ints
from octavo.kernels.residual import residual_starts
from octavo.kernels.verify.oracle import StoredPart, attend_residual


def residual_spec(case: Case, spec: PoolSpec, *, window: int, keep: int) -> PoolSpec:
    keep = keep if case.window is None else case.keep
    layer = replace(case.layer, window=min(window, case.window or window), keep=keep)
    return replace(spec, layers=(layer,), k_format="bf16", v_format="bf16", num_pages=spec.num_pages + 3)


def with_gaps(table: Ints, case: Case, first: int, residual: PoolSpec, after: int) -> Ints:
    """Return the table's residual pages for ``first`` and later queries; released entries are 0."""
    (layer,), size = residual.layers, case.page_size
    assert layer.window is not None
    outer = first - (case.window or first + 1) + 1
    start = outer if first < after else max(outer, first - layer.window + 1)
    kept, shown = -(-layer.keep // size), max(start, 0) // size
    gaps = table.copy()
    gaps[kept : max(kept, shown)] = 0
    return gaps


def starts_of(step: AttentionMetadata, layer: LayerSpec, after: Ints) -> Ints:
    """Return the first position that each row reads from residual pages of ``layer``."""
    assert layer.window is not None
    first = residual_starts(step.positions, window=layer.window, page_size=step.page_size)
    return np.where(step.positions < after[step.row_sequences], 0, first).astype(np.int32)


def run_residual(
    case: Case, pool: PagedKVCache, after: list[int], *, dtype: mx.Dtype = mx.float32
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Write a case in two steps and attend in the last; return the output and the float64 result."""
    rng = np.random.default_rng(3)
    specs = [storage.spec for storage in pool.storages]
    tables = [shuffled_tables(case, rng, spec.num_pages) for spec in specs]
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
        starts = starts_of(whole[0], specs[1].layers[0], numbers[members])
        residual_layer = shown.only_group()._replace(starts=starts)
        step = replace(whole[0], groups=(*whole[0].groups, residual_layer))
        if sequences is case.sequences:
            step = with_whole(case, step)
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
        out, extras = queries, Extras.of(case, rng, step)
        if sequences is case.sequences:
            out = pool.attend(0, queries, AttendOptions(scale=case.head_dim**-0.5, **extras.arrays()))
        mx.eval(out, *pool.pending())
        assert pool.nonfinite_tokens() == []
        assert out.dtype == dtype
        for stored, metadata in zip(parts, whole, strict=True):
            for part, rows in zip(stored, (keys, values), strict=True):
                part.write(metadata.only_group().slots, as_numpy(rows))
    want = attend_residual(
        whole[0],
        replace(whole[1], groups=(whole[1].only_group()._replace(starts=starts),)),
        ((parts[0][0], parts[0][1]), (parts[1][0], parts[1][1])),
        as_numpy(queries),
        layer=case.layer,
        residual_layer=specs[1].layers[0],
        scale=case.head_dim**-0.5,
        **extras.truth(),
    )
    return as_numpy(out).astype(np.float64), want


def _empty(case: Case, spec: PoolSpec, part: int) -> StoredPart:
    return StoredPart.empty(
        (spec.k_format, spec.v_format)[part],
        num_pages=spec.num_pages,
        num_kv_heads=case.kv_heads,
        page_size=case.page_size,
        dim=(case.head_dim, case.layer.value_dim)[part],
    )
