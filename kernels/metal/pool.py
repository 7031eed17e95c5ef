"""``KVPool`` on Metal kernels, which write pages in place, without copies of the pool.

MLX does not see that a kernel changes its input. So each kernel on a layer's pages takes an output of the
previous kernel as an input, which keeps the order of launches. A step needs one launch per layer to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..formats import page_format
from ..interface import AttendOptions, PoolSpec, refuse_mask
from ..metadata import AttentionMetadata
from ..page_bytes import PageBytes, check_write, layer_bytes
from ..reference.backend import ReferencePool
from .attention import MetalStep, PagedAttention, Partials, Parts, StoredPages
from .latent_units import MAX_LATENT, may_hold_latents
from .latents import LatentAttention
from .launch import KernelLibrary, Launch, padded
from .page_copies import copy_pages
from .units import MAX_WRITE_SIMDGROUPS, MIN_ELEMENTS, check_dim, format_source, write_unit


class MetalPool(ReferencePool):
    def __init__(self, spec: PoolSpec, library: KernelLibrary) -> None:
        _check(spec)
        super().__init__(spec)
        self._library = library
        self._attention = PagedAttention(spec, library)
        self._latents = LatentAttention(spec, library)
        self._last = [mx.array(np.zeros(MIN_ELEMENTS, bool))] * len(spec.layers)
        self._metal_step: MetalStep | None = None
        self._rows: dict[int, mx.array] = {}
        self._no_flags: dict[int, mx.array] = {}

    def _plan(self, metadata: AttentionMetadata) -> None:
        self._metal_step = MetalStep.of(metadata)
        self._rows = {}

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        spec, tokens = self._spec.layers[layer], self._step.num_tokens
        heads = spec.num_kv_heads
        self._check_rows(layer, keys, values)
        shown = max(tokens, MIN_ELEMENTS)
        flagged = self._unstorable
        if flagged is None:
            flagged = self._no_flags.setdefault(shown, mx.array(np.zeros(shown, bool)))
        if heads not in self._rows:
            self._rows[heads] = padded(self._slot_targets(heads).astype(np.uint32).ravel())
        inputs = self._pages(layer).inputs() | {
            "keys": keys,
            "values": values,
            "targets": self._rows[heads],
            "flagged": flagged,
        }
        threads = 32 * min(2 * heads, MAX_WRITE_SIMDGROUPS)
        launch = Launch(
            grid=(shown * threads, 1, 1), threadgroup=(threads, 1, 1), outputs=(((shown,), mx.bool_),)
        )
        k_format, v_format, dims = self._spec.k_format, self._spec.v_format, (spec.head_dim, spec.value_dim)
        kernel = self._library.made(
            ("write", k_format, v_format, *dims),
            lambda: write_unit(page_format(k_format), page_format(v_format), *dims),
        )
        (written,) = kernel(inputs, launch)
        self._last[layer] = self._unstorable = written
        self._dtypes[layer] = (keys.dtype, values.dtype)

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        refuse_mask("metal", options.mask)
        self.check_queries(layer, queries, options)
        step, pages = self._metal_step, self._pages(layer)
        assert step is not None
        if options.rotary is None:
            attended = self._attention.attend(step, layer, queries, pages, options)
        else:
            self.check_latents(layer, queries, options)
            attended = self._latents.attend(step, layer, queries, options.rotary, pages, options)
        self._last[layer] = attended.read
        return attended.out

    def partials(self, layer: int, queries: mx.array, parts: Parts, options: AttendOptions) -> Partials:
        pages = self._pages(layer)
        if options.rotary is None:
            partials = self._attention.partials(layer, queries, pages, parts, options)
        else:
            partials = self._latents.partials(layer, queries, options.rotary, pages, parts, options)
        self._last[layer] = partials.read
        return partials

    def pending(self) -> list[mx.array]:
        return [] if self._unstorable is None else [self._unstorable]

    def flags(self) -> list[mx.array]:
        if self._unstorable is None:
            return []
        tokens = self._step.num_tokens
        return [self._unstorable if tokens >= MIN_ELEMENTS else self._unstorable[:tokens]]

    def gather_sequences(self, layer: int) -> tuple[mx.array, mx.array]:
        mx.eval(self._last[layer])
        dense = super().gather_sequences(layer)
        mx.eval(dense)  # must happen before the next write
        return dense

    def read_pages(self, pages: Sequence[int]) -> PageBytes:
        mx.eval(self._last)
        return super().read_pages(pages)

    def write_pages(self, pages: Sequence[int], data: PageBytes) -> None:
        check_write(self._spec, pages, data)
        mx.eval(self._last)
        at = np.array(pages, np.int64)
        for parts, place in zip(self._parts, layer_bytes(self._spec), strict=True):
            heads = data[:, place.span].reshape(len(pages), place.layer.num_kv_heads, -1)
            start = 0
            for array in (array for part in parts for array in part):
                memory = _memory(array).reshape(self._spec.num_pages, place.layer.num_kv_heads, -1)
                width = memory.shape[-1] * memory.itemsize
                memory[at] = np.ascontiguousarray(heads[..., start : start + width]).view(memory.dtype)
                start += width

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        for layer in range(len(self._spec.layers)):
            parts = self._pages(layer).inputs()
            after = parts.pop("after")
            self._last[layer] = copy_pages(self._library, self._spec, layer, parts, after, pairs)

    def _pages(self, layer: int) -> StoredPages:
        keys, values = self._parts[layer]
        return StoredPages(tuple(keys), tuple(values), self._last[layer])


def _memory(array: mx.array) -> NDArray[Any]:
    plain = array.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.dtype.size])
    mx.eval(plain)
    memory = np.array(plain, copy=False)
    assert memory.flags.writeable
    return memory


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
