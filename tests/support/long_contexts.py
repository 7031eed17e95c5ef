"""Attention over contexts of several parts (``kPartTokens`` positions)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from octavo.kernels import _ext
from octavo.kernels.residual import residual_starts

PAGE_SIZE = 16
OLD, LENGTH = 1990, 2110  # rows 1990 to 2109 cross the start of the third part
HEADS, DIM, ROTARY_DIM = 2, 64, 32


class Context:
    def __init__(self, name: str, group: int, *, latents: bool = False, residual: bool = False) -> None:
        self.latents = latents
        kv_heads, value_dim = (1, ROTARY_DIM) if latents else (HEADS, DIM)
        mx.random.seed(3)
        shapes = (
            *((kv_heads, DIM), (kv_heads, value_dim)),
            *((kv_heads * group, DIM), (kv_heads * group, ROTARY_DIM)),
        )
        keys, values, self.queries, self.rotary = (
            mx.random.normal((LENGTH, *shape)).astype(mx.bfloat16) for shape in shapes
        )
        pages = -(-LENGTH // PAGE_SIZE)
        self.table = mx.array(np.arange(pages, dtype=np.int32)[None])
        slots = mx.array(np.arange(LENGTH, dtype=np.int32))
        self.pool, self.residual = (
            self._write(codes, pages, keys, values, slots) for codes in (name, "bf16")
        )
        self.has_residual = residual

    @staticmethod
    def _write(
        codes: str, pages: int, keys: mx.array, values: mx.array, slots: mx.array
    ) -> tuple[_ext.PageLayout, mx.array]:
        layout = _ext.page_layout(
            pages, keys.shape[1], PAGE_SIZE, codes, keys.shape[2], codes, values.shape[2]
        )
        flags = mx.zeros(LENGTH, mx.int32)
        pool, _ = _ext.write_pages(layout, _ext.create_pool(layout), keys, values, slots, flags)
        mx.eval(pool)
        return layout, pool

    def attend(
        self, first: int, stop: int, *, window: int = 0, keep: int = 0, sinks: bool = False
    ) -> NDArray[np.float32]:
        """Return attention for rows ``first`` to ``stop``, float32 [stop - first, heads, dim]."""
        starts, length = mx.array([0, stop - first], mx.int32), mx.array([stop], mx.int32)
        sink = mx.linspace(-1, 3, self.queries.shape[1]) if sinks else None
        rotary = self.rotary[first:stop] if self.latents else None
        queries, table = self.queries[first:stop], self.table
        options: dict[str, Any] = {
            "scale": 0.125, "window": window, "keep": keep, "softcap": 0.0, "sinks": sink, "mask": None,
            "rotary": rotary, "exact": False,
        }  # fmt: skip
        if self.has_residual:
            positions = np.arange(first, stop, dtype=np.int32)
            latest = mx.array(residual_starts(positions, window=64, page_size=PAGE_SIZE))
            options["residual"] = (*self.residual, table, latest, 64, keep)
        out = _ext.attend(*self.pool, queries, table, starts, length, **options)
        return np.array(out.astype(mx.float32))


def differences(name: str, group: int, kind: str) -> list[tuple[int, int]]:
    """Return (chunk size, first row) of chunks that are not bit-identical to a single call."""
    context = Context(name, group, latents="latents" in kind, residual="residual" in kind)
    window, keep = (1500, 20) if "window" in kind else (0, 0)

    def rows(first: int, stop: int) -> NDArray[np.float32]:
        return context.attend(first, stop, window=window, keep=keep, sinks="sinks" in kind)

    whole = rows(OLD, LENGTH)
    assert np.isfinite(whole).all()
    assert whole.std() > 0.001
    found = []
    for size in (1, 3, 17, 50):
        for first in range(OLD, LENGTH, size if size > 1 else 7):
            stop = min(first + size, LENGTH)
            if not np.array_equal(rows(first, stop), whole[first - OLD : stop - OLD]):
                found.append((size, first))
    return found
