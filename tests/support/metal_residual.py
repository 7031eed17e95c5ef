from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from attention_backends import poison
from attention_cases import Case
from metal_backend import PAGES, Emulator
from octavo.kernels.interface import AttendOptions
from octavo.kernels.metal.attention import Partials, Parts
from octavo.kernels.metal.backend import MetalBackend
from octavo.kernels.metal.pool import MetalPool
from octavo.kernels.metal.residual import MetalResidualCache
from residual_cases import residual_spec


def watched_cache(
    emulator: Emulator, backend: MetalBackend, case: Case, formats: tuple[str, str], *, window: int, keep: int
) -> MetalResidualCache:
    """Return a cache full of NaN; the emulator reports reads of rows that no query needs."""
    spec = case.spec(*formats)
    cache = backend.create_residual_pool(spec, residual_spec(case, spec, window=window, keep=keep))
    assert isinstance(cache, MetalResidualCache)
    for kind, pool in enumerate((cache.quantized, cache.residual)):
        poison(pool)
        _watch(emulator, cache, pool, kind)
    return cache


def _watch(emulator: Emulator, cache: MetalResidualCache, pool: MetalPool, kind: int) -> None:
    unwatched = pool.partials

    def partials(layer: int, queries: mx.array, parts: Parts, options: AttendOptions) -> Partials:
        rows = read_rows(cache, pool, kind, layer)
        emulator.valid = dict.fromkeys(PAGES, rows[:, None])
        try:
            return unwatched(layer, queries, parts, options)
        finally:
            emulator.valid = {}

    pool.partials = partials  # type: ignore[method-assign]


def read_rows(cache: MetalResidualCache, pool: MetalPool, kind: int, layer: int) -> NDArray[np.bool_]:
    """Return a mask of pool rows [num_pages * Hkv * page_size] that a query needs.

    kind: 0 for quantized pages, 1 for residual pages."""
    step, spec, size = cache._metadata, pool.spec.layers[layer], pool.spec.page_size
    assert step is not None
    own, keep = cache.quantized.spec.layers[layer], cache.residual.spec.layers[layer].keep
    read = np.zeros((pool.spec.num_pages, spec.num_kv_heads, size), bool)
    starts = cache.starts()
    last = step.seen_until
    for row, (position, b) in enumerate(zip(step.positions, step.row_sequences, strict=True)):
        keys = np.arange(last[row] + 1)
        if own.window is not None:
            keys = keys[(keys > position - own.window) | (keys < own.keep)]
        whole = (keys >= starts[row]) | (keys < keep)
        keys = keys[whole if kind else ~whole]
        read[step.groups[kind].page_table[b, keys // size], :, keys % size] = True
    return read.ravel()
