from __future__ import annotations

import mlx.core as mx

from octavo.kernels import _ext

from ..model_ops import ImageResults

PAGE_SIZE = 64
WRITTEN_ROWS = 512
_FORMATS = {mx.bfloat16: "bf16", mx.float16: "fp16"}


class NativeImageAttention:
    """Attention of each row to all rows, computed by the kernels of paged attention.

    K and V are the pages of one sequence and keep their type. In the kernels, query i of n does not see the
    last n - 1 - i positions. So n positions of zeros follow the last row, and a mask hides them.
    """

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._pools: dict[tuple[object, ...], mx.array] = {}
        self._last: list[mx.array] = []

    def forget(self) -> None:
        self._pools.clear()
        self._last = []

    def __call__(
        self, q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None, size: int
    ) -> ImageResults | None:
        if q.shape[0] != 1 or q.dtype not in _FORMATS or k.dtype != q.dtype or v.dtype != q.dtype:
            return None
        num_rows, num_seen = q.shape[2], k.shape[2]
        size = min(size, num_rows)
        layout, pools = self._written(k, v, size)
        table = mx.arange(-(-(num_seen + size) // PAGE_SIZE), dtype=mx.int32)[None]
        seen = mx.ones((1, 1, num_seen), mx.bool_)
        if mask is not None:
            seen = mask.reshape(-1, *mask.shape[-2:]).swapaxes(0, 1)
        hidden = False if seen.dtype == mx.bool_ else -float("inf")
        seen = mx.pad(seen, [(0, 0), (0, 0), (0, size)], constant_values=hidden)
        queries, parts = q.squeeze(0).swapaxes(0, 1), []
        for first in range(0, num_rows, size):
            count = min(size, num_rows - first)
            rows = seen[first : first + count] if mask is not None else mx.repeat(seen, count, axis=0)
            starts, length = mx.array([0, count], mx.int32), mx.array([num_seen + count], mx.int32)
            rows = rows[..., : num_seen + count]
            out = _ext.attend(
                layout, pools[-1], queries[first : first + count], table, starts, length, scale, 0, 0, 0.0,
                None, rows, None, self._exact,
            )  # fmt: skip
            parts.append(out.swapaxes(0, 1)[None])
        self._last = parts
        return ImageResults(pools, parts)

    def _written(self, k: mx.array, v: mx.array, num_zeros: int) -> tuple[_ext.PageLayout, list[mx.array]]:
        num_seen, num_heads, name = k.shape[2], k.shape[1], _FORMATS[k.dtype]
        num_pages = -(-(num_seen + num_zeros) // PAGE_SIZE)
        settings = num_pages, num_heads, PAGE_SIZE, name, k.shape[3], name, v.shape[3]
        layout = _ext.page_layout(*settings)
        if settings not in self._pools:
            self._pools[settings] = _ext.create_pool(layout)
        keys, values = (each.squeeze(0).swapaxes(0, 1) for each in (k, v))
        if self._last:
            keys, values = mx.depends([keys, values], self._last)
        pool, pools, first = self._pools[settings], [], 0
        cuts = [*range(WRITTEN_ROWS, num_seen, WRITTEN_ROWS)]
        zeros = (
            mx.zeros((num_zeros, *keys.shape[1:]), k.dtype),
            mx.zeros((num_zeros, *values.shape[1:]), k.dtype),
        )
        parts = [*zip(mx.split(keys, cuts), mx.split(values, cuts), strict=True), zeros]
        for some_keys, some_values in parts:
            slots = mx.arange(first, first + len(some_keys), dtype=mx.int32)
            pool, _ = _ext.write_pages(layout, pool, some_keys, some_values, slots, mx.zeros_like(slots))
            pools.append(pool)
            first += len(some_keys)
        return layout, pools
