"""Check that a device lets kernels write pages in place, in the order of their launches."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..interface import AttendOptions, LayerSpec, PoolSpec
from ..metadata import AttentionMetadata
from .launch import KernelLibrary
from .pool import MetalPool

_PAGE_SIZE = 16
_LAYER = LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64)
_STEPS = 6


def in_place_problem(library: KernelLibrary) -> str | None:
    if not copies_pages(library):
        return "pages are copied"
    return None if overlaps_steps(library) else "steps in flight give the same"


def copies_pages(library: KernelLibrary) -> bool:
    """Return whether this device correctly copies a page that it has just written."""
    pool = _pool(library)
    rows = mx.random.normal((_PAGE_SIZE, 2, 64), key=mx.random.key(0))
    pool.begin_step(_step(0, _PAGE_SIZE, page=0))
    pool.write(0, rows, -rows)
    pool.copy_pages([(0, 2), (2, 3)])
    pages = [pool.gather_sequences(0)]
    pool.begin_step(_step(0, _PAGE_SIZE, page=3))
    pages.append(pool.gather_sequences(0))
    (keys, values), (copied_keys, copied_values) = pages
    same = mx.array_equal(keys, copied_keys) & mx.array_equal(values, copied_values)
    return bool(same & (keys != 0).any())


def overlaps_steps(library: KernelLibrary) -> bool:
    """Return whether several steps in flight give the same bits as steps one by one."""
    outs = []
    for waits in (True, False):
        pool, made = _pool(library), []
        for step in range(_STEPS):
            rows = mx.random.normal((1, 2, 64), key=mx.random.key(step))
            pool.begin_step(_step(step % 2, step % 2 + 1, page=0))
            pool.write(0, rows, -rows)
            made.append(pool.attend(0, mx.ones((1, 2, 64)), AttendOptions(scale=0.125)))
            mx.async_eval(made[-1], *pool.pending())
            if waits:
                mx.eval(made[-1])
        outs.append(mx.concatenate(made))
    alone, together = outs
    return bool(mx.array_equal(alone, together) & (alone != 0).any())


def _pool(library: KernelLibrary) -> MetalPool:
    spec = PoolSpec(layers=(_LAYER,), num_pages=4, page_size=_PAGE_SIZE, k_format="fp4", v_format="bf16")
    return MetalPool(spec, library)


def _step(start: int, stop: int, *, page: int) -> AttentionMetadata:
    return AttentionMetadata.of([(start, stop)], np.array([[page]], np.int32), page_size=_PAGE_SIZE)
