"""Pages written in place: no scatter, and no copy of a pool that somebody still holds.

The writer changes an input, which MLX does not see. Its order comes from declared dependencies
alone: readers take the writers' ``storable`` as inputs, the next writers take what the last reader
made, and whatever reads pages by MLX's own operations waits for the writes first. Copying a page is
a write of the pool too: a kernel that moves the pages' bytes and nothing else. All this is an option,
and only for a device on which a self-test has shown that it works.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..formats import PageFormat
from ..interface import LayerSpec, PoolSpec
from ..metadata import AttentionMetadata, GroupMetadata
from ..page_bytes import PageBytes
from .attention import StoredPages
from .copy import copy_pages
from .launch import KernelLibrary, padded
from .pool import MetalPool, rows_launch
from .units import MIN_ELEMENTS, NUM_SIMDGROUPS, Unit, write_unit


class InPlacePool(MetalPool):
    """A ``MetalPool`` whose kernels write the pool's own arrays."""

    def __init__(self, spec: PoolSpec, library: KernelLibrary) -> None:
        super().__init__(spec, library)
        nothing = mx.zeros(MIN_ELEMENTS)
        self._written: list[list[mx.array]] = [[nothing, nothing] for _ in spec.layers]
        self._last_read = [nothing] * len(spec.layers)
        self._rows: dict[int, mx.array] = {}

    def begin_step(self, metadata: AttentionMetadata) -> None:
        super().begin_step(metadata)
        self._rows = {}

    def _was_read(self, layer: int, result: mx.array) -> None:
        self._last_read[layer] = result

    def gather_sequences(self, layer: int) -> tuple[mx.array, mx.array]:
        mx.eval(self._written[layer])
        dense = super().gather_sequences(layer)
        mx.eval(dense)  # before the next write
        return dense

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        """As every write: after the last writers and readers, before the next."""
        for layer in range(len(self._spec.layers)):
            tokens = dict(zip(("k_written", "v_written"), self._written[layer], strict=True))
            tokens["after"] = self._last_read[layer]
            parts = super()._pages(layer).inputs()
            copied = copy_pages(self._library, self._spec, layer, parts, tokens, pairs)
            self._written[layer] = [copied, copied]
            self._last_read[layer] = copied

    def read_pages(self, pages: Sequence[int]) -> PageBytes:
        self._finish()
        return super().read_pages(pages)

    def write_pages(self, pages: Sequence[int], data: PageBytes) -> None:
        self._finish()
        super().write_pages(pages, data)

    def _finish(self) -> None:
        """MLX's own operations know nothing of kernels that write or read the pool's arrays."""
        mx.eval(self._written, self._last_read)

    def _pages(self, layer: int) -> StoredPages:
        keys, values = self._parts[layer]
        return StoredPages(tuple(keys), tuple(values), tuple(self._written[layer]))

    def _store(self, layer: int, part: int, rows: mx.array) -> mx.array:
        tokens, heads, dim = rows.shape
        count = tokens * heads
        at_least = -(-max(count, MIN_ELEMENTS) // NUM_SIMDGROUPS) * NUM_SIMDGROUPS
        inputs = {
            "rows": rows.reshape(-1, dim),
            "targets": self._target_rows(heads),
            "after": self._last_read[layer],
        } | dict(zip(("codes", "scales"), self._parts[layer][part], strict=False))
        (storable,) = self._library.run(self._row_unit(part, dim), inputs, rows_launch(at_least))
        self._written[layer][part] = storable
        return storable[:count]

    def _make_row_unit(self, fmt: PageFormat, dim: int) -> Unit:
        return write_unit(fmt, dim)

    def _target_rows(self, heads: int) -> mx.array:
        """The step's rows of the pool, [T * Hkv] or more."""
        if heads not in self._rows:
            page, offset = np.divmod(
                self._step.groups[0].slots[:, None].astype(np.int64), self._spec.page_size
            )
            rows = (page * heads + np.arange(heads)) * self._spec.page_size + offset
            self._rows[heads] = padded(rows.astype(np.uint32).ravel())
        return self._rows[heads]


def copies_pages(library: KernelLibrary) -> bool:
    """Whether this device copies a page that it has just written, to the bit."""
    layer = LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64)
    pool = InPlacePool(
        PoolSpec(layers=(layer,), num_pages=4, page_size=16, k_format="fp4", v_format="bf16"), library
    )
    rows = mx.random.normal((16, 2, 64), key=mx.random.key(0))
    pool.begin_step(_one_page(0))
    pool.write(0, rows, -rows)
    pool.copy_pages([(0, 2), (2, 3)])
    pages = [pool.gather_sequences(0)]
    pool.begin_step(_one_page(3))
    pages.append(pool.gather_sequences(0))
    (keys, values), (copied_keys, copied_values) = pages
    same = mx.array_equal(keys, copied_keys) & mx.array_equal(values, copied_values)
    return bool(same & (keys != 0).any())


def _one_page(page: int) -> AttentionMetadata:
    """A step of one sequence that fills ``page`` of 16."""
    positions = np.arange(16, dtype=np.int32)
    return AttentionMetadata(
        positions=positions,
        q_start=np.array([0, 16], np.int32),
        kv_len=np.array([16], np.int32),
        groups=(GroupMetadata(slots=16 * page + positions, page_table=np.array([[page]], np.int32)),),
        page_size=16,
    )
