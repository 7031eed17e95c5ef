"""The K/V cache of a whole model: a pool, or one with its residual pages, for each group of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .chunked import ChunkedKVCache
from .groups import LayerGroup
from .interface import AttendOptions, AttentionBackend, PagedKVCache, PageStorage, PoolSpec
from .metadata import AttentionMetadata
from .replay import ReplayablePool

if TYPE_CHECKING:
    import mlx.core as mx


def create_kv_cache(
    backend: AttentionBackend,
    spec: PoolSpec,
    groups: Sequence[LayerGroup],
    num_pages: Sequence[int],
    *,
    residual: Sequence[LayerGroup] = (),
    residual_format: str = "bf16",
) -> PagedKVCache:
    """A cache for all layers of ``spec``, with so many pages for each group and then for each of its
    residual windows, if they are given. ValueError names what the backend cannot hold."""
    specs = [
        replace(spec, layers=tuple(spec.layers[index] for index in group.members), num_pages=pages)
        for group, pages in zip(groups, num_pages, strict=False)
    ]
    caches: list[PagedKVCache]
    if residual:
        beside = [
            _residual_spec(some, group, pages, residual_format)
            for some, group, pages in zip(specs, residual, num_pages[len(groups) :], strict=True)
        ]
        caches = [backend.create_residual_pool(*both) for both in zip(specs, beside, strict=True)]
    else:
        caches = [backend.create_pool(some) for some in specs]
    caches = [
        ChunkedKVCache(cache, group.window) if group.chunked and group.window else cache
        for cache, group in zip(caches, groups, strict=True)
    ]
    return caches[0] if len(caches) == 1 else GroupedKVCache(caches, [group.members for group in groups])


def _residual_spec(spec: PoolSpec, group: LayerGroup, num_pages: int, name: str) -> PoolSpec:
    layers = tuple(replace(layer, window=group.window, keep=group.keep) for layer in spec.layers)
    return replace(spec, layers=layers, num_pages=num_pages, k_format=name, v_format=name)


class GroupedKVCache:
    """``PagedKVCache`` over one cache per group of layers; layers are those of the model.

    Of caches with several pools each, the first ones come first: the pages of every group, then the
    residual pages of every group.
    """

    def __init__(self, caches: Sequence[PagedKVCache], members: Sequence[Sequence[int]]) -> None:
        self._caches = tuple(caches)
        kinds = [cache.storages for cache in caches]
        self.storages: tuple[PageStorage, ...] = tuple(
            storage for kind in zip(*kinds, strict=True) for storage in kind
        )
        self._parts = [  # of a step's groups, those of each cache
            range(index, len(self.storages), len(caches)) for index in range(len(caches))
        ]
        parts = [cache.replayable for cache in caches]
        self.replayable: tuple[ReplayablePool, ...] = (
            tuple(pool for part in parts for pool in part) if all(parts) else ()
        )
        places = {
            layer: (cache, index)
            for cache, layers in zip(caches, members, strict=True)
            for index, layer in enumerate(layers)
        }
        self._places = [places[layer] for layer in range(len(places))]

    def begin_step(self, metadata: AttentionMetadata) -> None:
        if len(metadata.groups) != len(self.storages):
            raise ValueError(
                f"a step needs the metadata of {len(self.storages)} groups, got {len(metadata.groups)}"
            )
        for cache, part in zip(self._caches, self._parts, strict=True):
            cache.begin_step(metadata.select(part))

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        cache, index = self._places[layer]
        cache.write(index, keys, values)

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        cache, index = self._places[layer]
        return cache.attend(index, queries, options)

    def gather(self, layer: int) -> tuple[mx.array, mx.array]:
        cache, index = self._places[layer]
        return cache.gather(index)

    def pending(self) -> list[mx.array]:
        return [array for cache in self._caches for array in cache.pending()]

    def flags(self) -> list[mx.array]:
        return [flags for cache in self._caches for flags in cache.flags()]

    def nonfinite_tokens(self) -> list[int]:
        return sorted({row for cache in self._caches for row in cache.nonfinite_tokens()})
