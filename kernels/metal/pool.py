"""``KVPool`` on Metal kernels.

Pages are the reference pool's arrays: codes and scales of K and of V per layer, rows in page
order. A write launches one kernel that rotates and quantizes all rows of K (one more for V) and
lets MLX scatter the results into the pool arrays, so that every dependency is in MLX's graph.
Reading pages whole (``gather``) and copying them is left to MLX's own operations.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from octavo.kernels.formats import page_format
from octavo.kernels.interface import PoolSpec
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.metal.attention import PagedAttention, StoredPages
from octavo.kernels.metal.launch import KernelLibrary, Launch
from octavo.kernels.metal.units import (
    MIN_ELEMENTS,
    NUM_SIMDGROUPS,
    check_dim,
    quantize_unit,
    struct_name,
)
from octavo.kernels.reference import ReferencePool


class MetalPool(ReferencePool):
    """Writes and attends with kernels from ``library``."""

    def __init__(self, spec: PoolSpec, library: KernelLibrary) -> None:
        _check(spec)
        super().__init__(spec)
        self._library = library
        self._formats = (page_format(spec.k_format), page_format(spec.v_format))
        self._attention = PagedAttention(spec, library)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        super().begin_step(metadata)
        self._attention.begin_step(metadata)

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        spec = self._spec.layers[layer]
        tokens, targets = self._step.num_tokens, self._targets(spec.num_kv_heads)
        bad = self._unstorable
        for part, (rows, dim) in enumerate(((keys, spec.head_dim), (values, spec.value_dim))):
            if rows.shape != (tokens, spec.num_kv_heads, dim):
                name = "values" if part else "keys"
                raise ValueError(f"{name} must be {(tokens, spec.num_kv_heads, dim)}, got {rows.shape}")
            *encoded, storable = self._quantize(part, rows)
            for stored, new in zip(self._parts[layer][part], encoded, strict=True):
                stored[targets] = new.reshape(tokens, spec.num_kv_heads, -1)
            failed = mx.logical_not(storable.reshape(tokens, -1).all(axis=-1))
            bad = failed if bad is None else mx.logical_or(bad, failed)
        self._unstorable = bad
        self._dtypes[layer] = (keys.dtype, values.dtype)

    def attend(
        self,
        layer: int,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        softcap: float | None = None,
        alibi_slopes: mx.array | None = None,
    ) -> mx.array:
        """As ``KVPool.attend``; ``alibi_slopes`` [Hq] m adds ``m * (j - p)`` to the logit of the
        key at position j for the query at p."""
        pages = StoredPages(*(tuple(part) for part in self._parts[layer]))
        return self._attention.attend(
            layer, queries, pages, scale=scale, sinks=sinks, softcap=softcap, slopes=alibi_slopes
        )

    def _quantize(self, part: int, rows: mx.array) -> list[mx.array]:
        """codes [R, width], (scales [R, 1]), storable [R] of rows [T, Hkv, dim], R = T * Hkv."""
        fmt, dim = self._formats[part], rows.shape[-1]
        flat = rows.reshape(-1, dim)
        count = len(flat)
        layout = self._codecs[part].layout(dim)
        outputs = tuple(((count, width), dtype) for width, dtype in layout)
        threads = 32 * NUM_SIMDGROUPS
        launch = Launch(
            grid=(-(-count // NUM_SIMDGROUPS) * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            outputs=(*outputs, ((count,), mx.bool_)),
        )
        return self._library.run(quantize_unit(fmt, dim), {"rows": flat}, launch)


def _check(spec: PoolSpec) -> None:
    """ValueError for pools that the kernels cannot read."""
    size = spec.page_size
    if size & (size - 1):
        raise ValueError(
            f"page_size must be a power of two for the Metal kernels, got {size}; use 16, 32 or 64"
        )
    for layer in spec.layers:
        check_dim("head_dim", layer.head_dim)
        check_dim("value_dim", layer.value_dim)
        rows = spec.num_pages * layer.num_kv_heads * size
        if rows < MIN_ELEMENTS or rows > np.iinfo(np.uint32).max:
            raise ValueError(
                f"a layer's pages must hold {MIN_ELEMENTS} to {np.iinfo(np.uint32).max} rows for the Metal "
                f"kernels, got {rows} ({spec.num_pages} pages); choose another number of pages"
            )
    for name in (spec.k_format, spec.v_format):
        struct_name(page_format(name))


class MetalBackend:
    """``AttentionBackend`` on Metal; ``library`` says who compiles the kernels."""

    def __init__(self, library: KernelLibrary | None = None) -> None:
        self._library = KernelLibrary() if library is None else library

    @property
    def name(self) -> str:
        return "metal"

    @property
    def library(self) -> KernelLibrary:
        return self._library

    def create_pool(self, spec: PoolSpec) -> MetalPool:
        return MetalPool(spec, self._library)
