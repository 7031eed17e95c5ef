"""Pages written in place: no scatter, and no copy of a pool that is still referenced.

The writer changes an input, which MLX does not see. Declared dependencies alone give the order: every kernel
that writes, reads or copies pages of a layer takes the output of the previous one as an input and makes a
small array for the next. So the kernels of a layer run in launch order, also those of several steps in
flight. MLX's own operations read pages only after the kernels, and the host writes pages only when no kernel
runs.

So a step costs one launch per layer for K, V and their flags, and the pool's arrays never change. The device
must let kernels write their inputs: see ``in_place_check``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..interface import PoolSpec
from ..metadata import AttentionMetadata
from ..page_bytes import PageBytes, check_write, layer_bytes
from .attention import StoredPages
from .copy import copy_pages
from .launch import Kernel, KernelLibrary, Launch, padded
from .pool import MetalPool
from .units import MAX_WRITE_SIMDGROUPS, MIN_ELEMENTS, write_unit


class InPlacePool(MetalPool):
    """A ``MetalPool`` whose kernels write the pool's own arrays. ``_last[layer]`` is the output of the last
    kernel on the layer's pages. ``_unstorable`` is the output of the step's last write, bool [max(T, 8)]:
    tokens with a row that could not be stored in some layer so far."""

    def __init__(self, spec: PoolSpec, library: KernelLibrary) -> None:
        super().__init__(spec, library)
        self._last = [mx.array(np.zeros(MIN_ELEMENTS, bool))] * len(spec.layers)
        self._rows: dict[int, mx.array] = {}
        self._no_flags: dict[int, mx.array] = {}
        self._writers: dict[tuple[int, int], Kernel] = {}

    def begin_step(self, metadata: AttentionMetadata) -> None:
        super().begin_step(metadata)
        self._rows = {}

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        self._check_rows(layer, keys, values)
        tokens, heads, _ = keys.shape
        shown = max(tokens, MIN_ELEMENTS)
        flagged = self._unstorable
        if flagged is None:
            flagged = self._no_flags.setdefault(shown, mx.array(np.zeros(shown, bool)))
        inputs = self._pages(layer).inputs() | {
            "keys": keys,
            "values": values,
            "targets": self._target_rows(heads),
            "flagged": flagged,
        }
        threads = 32 * min(2 * heads, MAX_WRITE_SIMDGROUPS)
        launch = Launch(
            grid=(shown * threads, 1, 1), threadgroup=(threads, 1, 1), outputs=(((shown,), mx.bool_),)
        )
        (written,) = self._writer(keys.shape[2], values.shape[2])(inputs, launch)
        self._last[layer] = self._unstorable = written
        self._dtypes[layer] = (keys.dtype, values.dtype)

    def pending(self) -> list[mx.array]:
        """Return the last write alone: it waits for all others of the step."""
        return [] if self._unstorable is None else [self._unstorable]

    def flags(self) -> list[mx.array]:
        if self._unstorable is None:
            return []
        tokens = self._step.num_tokens
        return [self._unstorable if tokens >= MIN_ELEMENTS else self._unstorable[:tokens]]

    def gather_sequences(self, layer: int) -> tuple[mx.array, mx.array]:
        mx.eval(self._last[layer])
        dense = super().gather_sequences(layer)
        mx.eval(dense)  # before the next write
        return dense

    def read_pages(self, pages: Sequence[int]) -> PageBytes:
        self._finish()
        return super().read_pages(pages)

    def write_pages(self, pages: Sequence[int], data: PageBytes) -> None:
        """Write pages on the host into the arrays' own memory. MLX's scatter would copy an array that the
        device still holds."""
        check_write(self._spec, pages, data)
        self._finish()
        at = np.array(pages, np.int64)
        for parts, place in zip(self._parts, layer_bytes(self._spec), strict=True):
            heads = data[:, place.span].reshape(len(pages), place.layer.num_kv_heads, -1)
            start = 0
            for array in (array for part in parts for array in part):
                memory = _memory(array).reshape(self._spec.num_pages, place.layer.num_kv_heads, -1)
                width = memory.shape[-1] * memory.itemsize
                memory[at] = np.ascontiguousarray(heads[..., start : start + width]).view(memory.dtype)
                start += width

    def _finish(self) -> None:
        """Wait for every kernel that writes or reads the pool's arrays."""
        mx.eval(self._last)

    def _was_read(self, layer: int, read: mx.array | None) -> None:
        assert read is not None, "a kernel read pages without a place in their order"
        self._last[layer] = read

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages, after the last kernel on them and before the next."""
        for layer in range(len(self._spec.layers)):
            parts = super()._pages(layer).inputs()
            self._last[layer] = copy_pages(self._library, self._spec, layer, parts, self._last[layer], pairs)

    def _pages(self, layer: int) -> StoredPages:
        keys, values = self._parts[layer]
        return StoredPages(tuple(keys), tuple(values), self._last[layer])

    def _writer(self, key_dim: int, value_dim: int) -> Kernel:
        """Return the kernel that stores rows, made once."""
        if (key_dim, value_dim) not in self._writers:
            unit = write_unit(*self._formats, key_dim, value_dim)
            self._writers[key_dim, value_dim] = self._library.kernel(unit)
        return self._writers[key_dim, value_dim]

    def _target_rows(self, heads: int) -> mx.array:
        """Return the pool rows that the step writes, [T * Hkv] or more."""
        if heads not in self._rows:
            page, offset = np.divmod(
                self._step.groups[0].slots[:, None].astype(np.int64), self._spec.page_size
            )
            rows = (page * heads + np.arange(heads)) * self._spec.page_size + offset
            self._rows[heads] = padded(rows.astype(np.uint32).ravel())
        return self._rows[heads]


def _memory(array: mx.array) -> NDArray[Any]:
    """Return the bytes of an evaluated array as writable unsigned integers."""
    plain = array.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.dtype.size])
    mx.eval(plain)
    memory = np.array(plain, copy=False)
    assert memory.flags.writeable
    return memory
