"""Pages written in place: no scatter, and no copy of a pool that somebody still holds.

The writer changes an input, which MLX does not see. Its order comes from declared dependencies
alone: readers take the writers' ``storable`` as inputs, the next writers take what the last reader
made, and whatever reads pages by MLX's own operations waits for the writes first. It is an option,
and only for a device on which a self-test has shown that it works.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from octavo.kernels.formats import PageFormat
from octavo.kernels.interface import PoolSpec
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.metal.attention import StoredPages
from octavo.kernels.metal.launch import KernelLibrary, padded
from octavo.kernels.metal.pool import MetalPool, rows_launch
from octavo.kernels.metal.units import MIN_ELEMENTS, NUM_SIMDGROUPS, Unit, write_unit


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
        out = super().attend(
            layer, queries, scale=scale, sinks=sinks, softcap=softcap, alibi_slopes=alibi_slopes
        )
        self._last_read[layer] = out
        return out

    def gather(self, layer: int) -> tuple[mx.array, mx.array]:
        mx.eval(self._written[layer])
        dense = super().gather(layer)
        mx.eval(dense)  # before the next write
        return dense

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        mx.eval(self._written, self._last_read)
        super().copy_pages(pairs)

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
            page, offset = np.divmod(self._step.slots[:, None].astype(np.int64), self._spec.page_size)
            rows = (page * heads + np.arange(heads)) * self._spec.page_size + offset
            self._rows[heads] = padded(rows.astype(np.uint32).ravel())
        return self._rows[heads]
