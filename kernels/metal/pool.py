"""``KVPool`` on Metal kernels.

A kernel rotates and quantizes rows of K or V. MLX then scatters the results into the pool arrays.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..formats import page_format
from ..interface import AttendOptions, PoolSpec, refuse_option
from ..metadata import AttentionMetadata
from ..reference.backend import ReferencePool
from .attention import PagedAttention, Partials, Parts, StoredPages
from .latent_units import MAX_LATENT, may_hold_latents
from .latents import LatentAttention
from .launch import KernelLibrary, Launch
from .units import (
    MIN_ELEMENTS,
    NUM_SIMDGROUPS,
    KernelSource,
    check_dim,
    format_source,
    quantize_unit,
)


class MetalPool(ReferencePool):
    def __init__(self, spec: PoolSpec, library: KernelLibrary) -> None:
        _check(spec)
        super().__init__(spec)
        self._library = library
        self._formats = (page_format(spec.k_format), page_format(spec.v_format))
        self._row_units: dict[tuple[int, int], KernelSource] = {}
        self._attention = PagedAttention(spec, library)
        self._latents = LatentAttention(spec, library)

    def _plan(self, metadata: AttentionMetadata) -> None:
        self._attention.begin_step(metadata)
        self._latents.begin_step(metadata)

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        self._check_rows(layer, keys, values)
        tokens = self._step.num_tokens
        stored = mx.logical_and(self._store(layer, 0, keys), self._store(layer, 1, values))
        bad = mx.logical_not(stored.reshape(tokens, -1).all(axis=-1))
        self._unstorable = bad if self._unstorable is None else mx.logical_or(self._unstorable, bad)
        self._dtypes[layer] = (keys.dtype, values.dtype)

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        refuse_option("metal", mask=options.mask)
        pages = self._pages(layer)
        if options.rotary is None:
            attended = self._attention.attend(layer, queries, pages, options)
        else:
            attended = self._latents.attend(layer, queries, options.rotary, pages, options)
        self._was_read(layer, attended.read)
        return attended.out

    def _check_rows(self, layer: int, keys: mx.array, values: mx.array) -> None:
        spec, tokens = self._spec.layers[layer], self._step.num_tokens
        for name, rows, dim in (("keys", keys, spec.head_dim), ("values", values, spec.value_dim)):
            if rows.shape != (tokens, spec.num_kv_heads, dim):
                raise ValueError(f"{name} must be {(tokens, spec.num_kv_heads, dim)}, got {rows.shape}")

    def _was_read(self, layer: int, read: mx.array | None) -> None: ...

    def partials(self, layer: int, queries: mx.array, rotary: mx.array | None, parts: Parts) -> Partials:
        pages = self._pages(layer)
        if rotary is None:
            partials = self._attention.partials(layer, queries, pages, parts)
        else:
            partials = self._latents.partials(layer, queries, rotary, pages, parts)
        self._was_read(layer, partials.read)
        return partials

    def _pages(self, layer: int) -> StoredPages:
        keys, values = self._parts[layer]
        return StoredPages(tuple(keys), tuple(values))

    def _store(self, layer: int, part: int, rows: mx.array) -> mx.array:
        tokens, heads, dim = rows.shape
        layout = self._codecs[part].layout(dim)
        launch = rows_launch(tokens * heads, *layout)
        unit = self._row_unit(part, dim)
        *encoded, storable = self._library.run(unit, {"rows": rows.reshape(-1, dim)}, launch)
        for stored, new in zip(self._parts[layer][part], encoded, strict=True):
            stored[self._targets(heads)] = new.reshape(tokens, heads, -1)
        return storable

    def _row_unit(self, part: int, dim: int) -> KernelSource:
        if (part, dim) not in self._row_units:
            self._row_units[part, dim] = quantize_unit(self._formats[part], dim)
        return self._row_units[part, dim]


def rows_launch(count: int, *layout: tuple[int, mx.Dtype]) -> Launch:
    threads = 32 * NUM_SIMDGROUPS
    outputs = tuple(((count, width), dtype) for width, dtype in layout)
    return Launch(
        grid=(-(-count // NUM_SIMDGROUPS) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        outputs=(*outputs, ((count,), mx.bool_)),
    )


def _check(spec: PoolSpec) -> None:
    size = spec.page_size
    if size & (size - 1):
        raise ValueError(
            f"page_size must be a power of two for the Metal kernels, got {size}; use 16, 32 or 64"
        )
    for layer in spec.layers:
        check_dim("head_dim", layer.head_dim, MAX_LATENT if may_hold_latents(layer) else 256)
        check_dim("value_dim", layer.value_dim)
        rows = spec.num_pages * layer.num_kv_heads * size
        if rows < MIN_ELEMENTS or rows > np.iinfo(np.uint32).max:
            raise ValueError(
                f"a layer's pages must hold {MIN_ELEMENTS} to {np.iinfo(np.uint32).max} rows for the Metal "
                f"kernels, got {rows} ({spec.num_pages} pages); choose another number of pages"
            )
    for name in (spec.k_format, spec.v_format):
        format_source(name)
