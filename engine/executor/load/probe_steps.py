from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from octavo.kernels.groups import group_layers
from octavo.kernels.interface import AttentionBackend, PagedKVCache, PoolSpec
from octavo.kernels.kv_cache import GroupedKVCache, create_kv_cache
from octavo.kernels.metadata import AttentionMetadata, StateMetadata

from ..cache_layout import CacheLayout

PAGE_SIZE = 8

Work = tuple[int, int, int]
"""Sequence index and range [start, stop) of new positions."""

Floats = NDArray[np.float32]


def num_pages(length: int) -> int:
    return -(-length // PAGE_SIZE)


def probe_cache(backend: AttentionBackend, layout: CacheLayout, num_pages: int) -> PagedKVCache:
    name = "bf16" if layout.dtype == mx.bfloat16 else "fp16"
    spec = PoolSpec(
        layers=layout.layers, num_pages=num_pages, page_size=PAGE_SIZE, k_format=name, v_format=name
    )
    if not layout.layers:
        return GroupedKVCache((), ())
    if not any(layer.chunked for layer in spec.layers):
        return backend.create_pool(spec)
    groups = group_layers(spec.layers, sys.maxsize)
    return _SharedTables(create_kv_cache(backend, spec, groups, [spec.num_pages] * len(groups)))


class _SharedTables:
    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache

    def begin_step(self, metadata: AttentionMetadata) -> None:
        self._cache.begin_step(replace(metadata, groups=metadata.groups * len(self._cache.storages)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def step_metadata(work: Sequence[Work], *, num_sequences: int, longest: int) -> AttentionMetadata:
    width = num_pages(longest)
    tables = (
        1
        + np.arange(width, dtype=np.int32)[::-1][None] * num_sequences
        + np.arange(num_sequences, dtype=np.int32)[:, None]
    )
    return AttentionMetadata.of(
        [(start, stop) for _, start, stop in work],
        tables[[i for i, _, _ in work]],
        page_size=PAGE_SIZE,
        states=StateMetadata(slots=np.array([num_sequences - i for i, _, _ in work], np.int32)),
    )
