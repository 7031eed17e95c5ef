"""Attention over quantized pages and their 16-bit twins against float64, for the self-test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from octavo.kernels.interface import AttentionBackend, LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata, Ints
from octavo.kernels.mixed import twin_starts
from octavo.kernels.truth import StoredPart, dense_attention

_LAYER = LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64)
_PAGE_SIZE = 16
_READ_AS_TWINS = replace(_LAYER, window=1, keep=_PAGE_SIZE)
_TABLE = np.array([[3, 0, 2], [5, 1, 4]], np.int32)  # of the pages; twin p of page p is at 5 - p
_STEPS = (
    ((0, 0, 40), (1, 0, 0)),  # (sequence, positions before the step, rows of the step)
    ((0, 40, 1), (1, 0, 21)),
)


def attend_over_twins(
    backend: AttentionBackend, format_name: str
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """What comes out of a step of one decoded row and one chunk, and the truth, both [22, 4, 64].

    Queries read their first page and their own in 16 bits. Raises ValueError if the
    backend cannot do that.
    """
    spec = PoolSpec(
        layers=(_LAYER,), num_pages=6, page_size=_PAGE_SIZE, k_format=format_name, v_format=format_name
    )
    twins = replace(spec, layers=(_READ_AS_TWINS,), k_format="bf16", v_format="bf16")
    pool = backend.create_mixed_pool(spec, twins)
    quantized, whole = ([_part(name), _part(name)] for name in (format_name, "bf16"))
    rng = np.random.default_rng(4)
    out, queries, step = mx.zeros(0), np.zeros((0, 4, 64), np.float32), _metadata(_STEPS[0])
    for sequences in _STEPS:
        step = _metadata(sequences)
        queries = rng.standard_normal((step.num_tokens, 4, 64)).astype(np.float32)
        rows = rng.standard_normal((2, step.num_tokens, 2, 64)).astype(np.float32)
        pool.begin_step(step)
        pool.write(0, mx.array(rows[0]), mx.array(rows[1]))
        out = pool.attend(0, mx.array(queries), scale=0.125)
        mx.eval(out, *pool.pending())
        for metadata, parts in zip(step.groups, (quantized, whole), strict=True):
            for part, written in zip(parts, rows, strict=True):
                part.write(metadata.slots, written)
    return np.array(out), _truth(step, queries, quantized, whole)


def _part(name: str) -> StoredPart:
    return StoredPart.empty(name, num_pages=6, num_kv_heads=2, page_size=_PAGE_SIZE, dim=64)


def _metadata(sequences: tuple[tuple[int, int, int], ...]) -> AttentionMetadata:
    members = [member for member in sequences if member[2]]
    at = [np.arange(old, old + new, dtype=np.int32) for _, old, new in members]
    tables = _TABLE[[sequence for sequence, _, _ in members]]
    pages = AttentionMetadata(
        positions=np.concatenate(at),
        slots=_slots(tables, at),
        q_start=np.cumsum([0] + [new for _, _, new in members]).astype(np.int32),
        kv_len=np.array([old + new for _, old, new in members], np.int32),
        page_table=tables,
        page_size=_PAGE_SIZE,
    )
    return replace(pages, others=(replace(pages, slots=_slots(5 - tables, at), page_table=5 - tables),))


def _slots(tables: Ints, positions: list[Ints]) -> Ints:
    return np.concatenate(
        [
            table[at // _PAGE_SIZE] * _PAGE_SIZE + at % _PAGE_SIZE
            for table, at in zip(tables, positions, strict=True)
        ]
    ).astype(np.int32)


def _truth(
    step: AttentionMetadata,
    queries: NDArray[np.float32],
    quantized: list[StoredPart],
    whole: list[StoredPart],
) -> NDArray[np.float64]:
    """Row by row: of each position, K and V of the kind that the row reads."""
    pages, twins = step.groups
    out: list[NDArray[Any]] = []
    for b, length in enumerate(step.kv_len.tolist()):
        seen = np.arange(length, dtype=np.int32)
        slots, twin_slots = (_slots(group.page_table[b : b + 1], [seen]) for group in (pages, twins))
        for row in range(step.q_start[b], step.q_start[b + 1]):
            at = step.positions[row : row + 1]
            start = twin_starts(at, np.zeros(1, np.int32), window=1, page_size=_PAGE_SIZE)
            from_twin = ((seen >= start) | (seen < _READ_AS_TWINS.keep))[:, None, None]
            keys, values = (
                np.where(from_twin, twin.read(twin_slots), part.read(slots))
                for twin, part in zip(whole, quantized, strict=True)
            )
            out.append(dense_attention(queries[row : row + 1], keys, values, at, scale=0.125))
    return np.concatenate(out)
