"""The K/V cache of a model: one pool for each group of layers.

In layers with chunked attention, each chunk becomes a sequence of its own, whose positions start at 0. So
kernels need no support for chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .groups import LayerGroup
from .interface import AttendOptions, AttentionBackend, PagedKVCache, PageStorage, PoolSpec
from .metadata import AttentionMetadata, GroupMetadata, Ints
from .replay import ReplayablePool

if TYPE_CHECKING:
    import mlx.core as mx


def cut_into_chunks(metadata: AttentionMetadata, chunk: int) -> AttentionMetadata:
    """Return the step with each chunk as a sequence of its own.

    chunk   positions per chunk, a multiple of the page size
    """
    if (metadata.positions < chunk).all():
        return metadata
    number, row_sequences = metadata.positions // chunk, metadata.row_sequences
    begins = np.diff(number, prepend=-1).astype(bool) | np.diff(row_sequences, prepend=-1).astype(bool)
    first = np.flatnonzero(begins).astype(np.int32)
    q_start = np.append(first, np.int32(metadata.num_tokens))
    positions = metadata.positions - number * np.int32(chunk)
    kv_len = positions[q_start[1:] - 1] + np.int32(1)
    owner, start = row_sequences[first], number[first] * np.int32(chunk)
    width = -(-int(kv_len.max()) // metadata.page_size)
    columns = (start[:, None] // metadata.page_size + np.arange(width)).astype(np.int32)
    return replace(
        metadata,
        positions=positions,
        q_start=q_start,
        kv_len=kv_len,
        groups=tuple(
            GroupMetadata(
                slots=group.slots,
                page_table=_columns(group.page_table[owner], columns),
                starts=None if group.starts is None else np.maximum(group.starts - number * chunk, 0),
            )
            for group in metadata.groups
        ),
    )


def _columns(table: Ints, columns: Ints) -> Ints:
    inside = columns < table.shape[1]
    taken = np.take_along_axis(table, np.where(inside, columns, 0), axis=1)
    return np.where(inside, taken, 0).astype(np.int32)


def create_kv_cache(
    backend: AttentionBackend,
    spec: PoolSpec,
    groups: Sequence[LayerGroup],
    num_pages: Sequence[int],
    *,
    residual: Sequence[LayerGroup] = (),
    residual_format: str = "bf16",
) -> PagedKVCache:
    """Return a cache for all layers of ``spec``.

    num_pages   pages of each group, then of each group's residual window

    Raises ValueError if the backend cannot hold such a cache.
    """
    for group in groups:
        if (chunk := group.chunk) is not None and chunk % spec.page_size:
            raise ValueError(
                f"layers attend within chunks of {chunk} positions, which must be a multiple of page_size, "
                f"got {spec.page_size}; use a page_size that divides them"
            )
    specs = [
        replace(spec, layers=tuple(spec.layers[index] for index in group.members), num_pages=pages)
        for group, pages in zip(groups, num_pages, strict=False)
    ]
    caches: list[PagedKVCache]
    if residual:
        residual_specs = [
            _residual_spec(some, group, pages, residual_format)
            for some, group, pages in zip(specs, residual, num_pages[len(groups) :], strict=True)
        ]
        caches = [backend.create_residual_pool(*both) for both in zip(specs, residual_specs, strict=True)]
    else:
        caches = [backend.create_pool(some) for some in specs]
    plain = len(caches) == 1 and groups[0].chunk is None
    return caches[0] if plain else GroupedKVCache(caches, groups)


def _residual_spec(spec: PoolSpec, group: LayerGroup, num_pages: int, name: str) -> PoolSpec:
    layers = tuple(replace(layer, window=group.window, keep=group.keep) for layer in spec.layers)
    return replace(spec, layers=layers, num_pages=num_pages, k_format=name, v_format=name)


class JoinedCaches:
    def __init__(self, caches: Sequence[PagedKVCache]) -> None:
        self._caches = tuple(caches)
        parts = [cache.replayable for cache in caches]
        self.replayable: tuple[ReplayablePool, ...] = (
            tuple(pool for part in parts for pool in part) if all(parts) else ()
        )

    def pending(self) -> list[mx.array]:
        return [array for cache in self._caches for array in cache.pending()]

    def flags(self) -> list[mx.array]:
        return [flags for cache in self._caches for flags in cache.flags()]

    def nonfinite_tokens(self) -> list[int]:
        return sorted({row for cache in self._caches for row in cache.nonfinite_tokens()})


class GroupedKVCache(JoinedCaches):
    """``PagedKVCache`` that joins one cache per group of layers.

    ``storages`` has the pages of every group, then the residual pages of every group.
    """

    def __init__(self, caches: Sequence[PagedKVCache], groups: Sequence[LayerGroup]) -> None:
        super().__init__(caches)
        self._chunks = [group.chunk for group in groups]
        self._chunked = {layer for group in groups if group.chunked for layer in group.members}
        kinds = [cache.storages for cache in caches]
        self.storages: tuple[PageStorage, ...] = tuple(
            storage for kind in zip(*kinds, strict=True) for storage in kind
        )
        self._parts = [range(index, len(self.storages), len(caches)) for index in range(len(caches))]
        places = {
            layer: (cache, index)
            for cache, group in zip(caches, groups, strict=True)
            for index, layer in enumerate(group.members)
        }
        self._places = [places[layer] for layer in range(len(places))]

    def begin_step(self, metadata: AttentionMetadata) -> None:
        if self._caches and len(metadata.groups) != len(self.storages):
            raise ValueError(
                f"a step needs the metadata of {len(self.storages)} groups, got {len(metadata.groups)}"
            )
        for cache, part, chunk in zip(self._caches, self._parts, self._chunks, strict=True):
            step = metadata if len(self._caches) == 1 else metadata.select(part)
            cache.begin_step(step if chunk is None else cut_into_chunks(step, chunk))

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        cache, index = self._places[layer]
        cache.write(index, keys, values)

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        if options.mask is not None and layer in self._chunked:
            raise ValueError("chunked layers take no mask, because they count positions from a chunk's start")
        cache, index = self._places[layer]
        return cache.attend(index, queries, options)

    def gather(self, layer: int) -> tuple[mx.array, mx.array]:
        if layer in self._chunked:
            raise ValueError(f"layer {layer} must not attend within chunks to gather its K and V")
        cache, index = self._places[layer]
        return cache.gather(index)
