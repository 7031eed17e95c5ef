"""Comparison of attention over quantized and residual pages with float64, for the self-test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..interface import AttendOptions, AttentionBackend, PoolSpec
from ..metadata import AttentionMetadata, GroupMetadata
from .oracle import StoredPart
from .oracle_residual import Parts, attend_residual


def attend_over_residual(
    backend: AttentionBackend, spec: PoolSpec, steps: Sequence[AttentionMetadata]
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Return the last step's output [T, 2 * Hkv, D], and the expected values. Queries read their sequence's
    first page and their own in 16 bits. The residual page of page p is page p + 1 of its pool, and that of
    the last page is 0. Raises ValueError if the backend cannot do that."""
    layer, rng = spec.layers[0], np.random.default_rng(4)
    beside = replace(layer, window=1, keep=spec.page_size)
    pool = backend.create_residual_pool(
        spec, replace(spec, layers=(beside,), k_format="bf16", v_format="bf16")
    )
    stored = _parts(spec, spec.k_format), _parts(spec, "bf16")
    out, want = np.zeros(0, np.float32), np.zeros(0)
    for pages in steps:
        residual = _beside(pages, spec.num_pages)
        step = replace(pages, groups=pages.groups + residual.groups)
        shape = (step.num_tokens, layer.num_kv_heads, layer.head_dim)
        queries = rng.standard_normal((shape[0], 2 * shape[1], shape[2])).astype(np.float32)
        rows = rng.standard_normal((2, *shape)).astype(np.float32)
        pool.begin_step(step)
        pool.write(0, mx.array(rows[0]), mx.array(rows[1]))
        attended = pool.attend(0, mx.array(queries), AttendOptions(scale=0.125))
        mx.eval(attended, *pool.pending())
        for metadata, parts in zip((pages, residual), stored, strict=True):
            for part, written in zip(parts, rows, strict=True):
                part.write(metadata.only_group().slots, written)
        out = np.array(attended)
        want = attend_residual(pages, residual, stored, queries, layer=layer, beside=beside, scale=0.125)
    return out, want


def _parts(spec: PoolSpec, name: str) -> Parts:
    layer = spec.layers[0]
    keys, values = (
        StoredPart.empty(
            name,
            num_pages=spec.num_pages,
            num_kv_heads=layer.num_kv_heads,
            page_size=spec.page_size,
            dim=layer.head_dim,
        )
        for _ in range(2)
    )
    return keys, values


def _beside(pages: AttentionMetadata, num_pages: int) -> AttentionMetadata:
    """Return the places of the step's rows in the residual pages."""
    num_slots, group = np.int32(num_pages * pages.page_size), pages.only_group()
    moved = GroupMetadata(
        slots=(group.slots + np.int32(pages.page_size)) % num_slots,
        page_table=(group.page_table + np.int32(1)) % np.int32(num_pages),
    )
    return replace(pages, groups=(moved,))
