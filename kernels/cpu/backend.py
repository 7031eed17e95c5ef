"""The native CPU backend: paged attention as MLX primitives.

Each layer has one uint8 array [num_pages, Hkv, bytes of one (page, head)], which is written in place. A write
returns a new handle to the buffer, and attention reads that handle. So each layer may be written only once
per evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from .. import _ext
from ..interface import AttendOptions, LayerSpec, PagedKVCache, PageStorage, PoolSpec
from ..masks import check_mask
from ..metadata import AttentionMetadata, GroupMetadata, Ints
from ..page_bytes import PageBytes, check_read, check_write, layer_bytes
from ..recurrent_kernels import RecurrentKernels
from ..replay import ReplayablePool
from ..residual_cache import ResidualCache
from ..visibility import visible
from . import recurrent

MIN_COLUMNS = 64
"""Smallest width of page tables. Widths grow in steps (64, 256, 1024), padded with zeros that kernels never
read. So the shape of steps rarely changes while sequences grow: for each new shape, a graph must be built and
captured."""


@dataclass(frozen=True, slots=True)
class CpuStep:
    num_tokens: int
    longest: int
    slots: mx.array
    q_start: mx.array
    kv_len: mx.array
    page_table: mx.array
    starts: mx.array


class CpuPool:
    def __init__(self, spec: PoolSpec, *, exact: bool = False) -> None:
        self._spec = spec
        self._exact = exact
        self._layouts = [_layout(spec, layer) for layer in spec.layers]
        self._layers = [_ext.create_pool(layout) for layout in self._layouts]
        self._likes = [mx.array(0, mx.float32)] * len(spec.layers)
        self._values: Ints | None = None
        self._shape = (0, 0, 0)
        self._step: CpuStep | None = None
        self._reach: tuple[mx.array, mx.array] | None = None
        self._masks: dict[tuple[int | None, int], mx.array] = {}
        self._flags: mx.array | None = None
        self._bound: Sequence[mx.array] | None = None

    @property
    def spec(self) -> PoolSpec:
        return self._spec

    @property
    def storages(self) -> tuple[PageStorage, ...]:
        return (self,)

    @property
    def replayable(self) -> tuple[ReplayablePool, ...]:
        return (self,)

    @property
    def nbytes(self) -> int:
        return sum(pages.nbytes for pages in self._layers)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        self.begin_group(metadata, metadata.only_group())

    def begin_group(self, metadata: AttentionMetadata, group: GroupMetadata) -> None:
        if metadata.page_size != self._spec.page_size:
            raise ValueError(f"page_size must be the pool's {self._spec.page_size}, got {metadata.page_size}")
        replace(metadata, groups=(group,)).check(self._spec.num_pages)
        num_rows, (num_sequences, num_columns) = len(metadata.positions), group.page_table.shape
        width = MIN_COLUMNS
        while width < num_columns:
            width *= 4
        table = np.zeros((num_sequences, width), np.int32)
        table[:, :num_columns] = group.page_table
        zeros = np.zeros(num_rows, np.int32)
        starts = zeros if group.starts is None else group.starts
        indices = group.slots, metadata.q_start, metadata.kv_len, table.reshape(-1), starts
        self._reach, self._masks = None, {}
        if metadata.last is not None:
            self._reach = mx.array(metadata.positions[:, None]), mx.array(metadata.last[:, None])
        values = np.concatenate((*indices, zeros))
        self._values, self._shape = values, (num_rows, num_sequences, width)
        self._step = None
        self._flags = None

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        step, flags = self.step, self._begun_flags()
        self._bound = None
        self._layers[layer], self._flags = _ext.write_pages(
            self._layouts[layer],
            self._layers[layer],
            _ext.shortcut(keys),
            _ext.shortcut(values),
            step.slots,
            flags,
        )
        if self._likes[layer].dtype != keys.dtype:
            self._likes[layer] = mx.array(0, keys.dtype)

    def attend(
        self, layer: int, queries: mx.array, options: AttendOptions, residual: CpuPool | None = None
    ) -> mx.array:
        step, spec = self.step, self._spec.layers[layer]
        if queries.shape[0] != step.num_tokens:
            raise ValueError(f"queries must have the step's {step.num_tokens} rows, got {queries.shape}")
        mask = self._mask(layer, options, queries.shape[1])
        return _ext.attend(
            self._layouts[layer],
            self._layers[layer],
            _ext.shortcut(queries),
            step.page_table,
            step.q_start,
            step.kv_len,
            options.scale,
            spec.window or 0,
            spec.keep,
            options.softcap or 0.0,
            options.sinks,
            mask,
            None if options.rotary is None else _ext.shortcut(options.rotary),
            self._exact,
            None if residual is None else residual._beside(layer),
        )

    def _beside(self, layer: int) -> tuple[_ext.PageLayout, mx.array, mx.array, mx.array, int, int]:
        step, spec = self.step, self._spec.layers[layer]
        pages = self._layouts[layer], self._layers[layer]
        return (*pages, step.page_table, step.starts, spec.window or 0, spec.keep)

    def _mask(self, layer: int, options: AttendOptions, num_heads: int) -> mx.array | None:
        step, spec = self.step, self._spec.layers[layer]
        if (mask := options.mask) is not None:
            return check_mask(mask, tokens=step.num_tokens, num_heads=num_heads, length=step.longest)
        if self._reach is None:
            return None
        window = spec.window, spec.keep
        if window not in self._masks:
            positions, last = self._reach
            self._masks[window] = visible(positions, mx.arange(step.longest), *window, last)[:, None]
        return self._masks[window]

    def gather(self, layer: int) -> tuple[mx.array, mx.array]:
        counts = np.diff(self.step_values()[1])
        rows = mx.array(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
        keys, values = self.gather_sequences(layer)
        return keys[rows], values[rows]

    def gather_sequences(self, layer: int) -> tuple[mx.array, mx.array]:
        step = self.step
        keys, values = _ext.gather_pages(
            self._layouts[layer],
            self._layers[layer],
            step.page_table,
            step.kv_len,
            step.longest,
            self._likes[layer],
        )
        return keys, values

    def pending(self) -> list[mx.array]:
        return self._layers if self._flags is None else [*self._layers, self._flags]

    @property
    def step_shape(self) -> tuple[int, int, int]:
        return self._shape

    def packed_values(self) -> list[Ints]:
        assert self._values is not None, "no step has begun"
        return [self._values]

    def step_values(self) -> list[Ints]:
        if self._values is None:
            raise ValueError("no step has begun; call begin_step first")
        num_rows, num_sequences, width = self._shape
        counts = [num_rows, num_sequences + 1, num_sequences, num_sequences * width, num_rows]
        parts = np.split(self._values, np.cumsum(counts))
        parts[3] = parts[3].reshape(num_sequences, width)
        return parts

    def _begun_flags(self) -> mx.array:
        return mx.zeros(self._shape[0], mx.int32) if self._flags is None else self._flags

    def step_inputs(self) -> list[mx.array]:
        step = self.step
        flags = self._begun_flags()
        indices = [step.slots, step.q_start, step.kv_len, step.page_table, step.starts]
        return [*indices, flags, *self._layers]

    def bind_inputs(self, arrays: Sequence[mx.array]) -> None:
        slots, q_start, kv_len, page_table, starts, self._flags, *self._layers = arrays
        self._step = replace(
            self.step,
            slots=slots,
            q_start=q_start,
            kv_len=kv_len,
            page_table=page_table,
            starts=starts,
        )

    def bind_pending(self, arrays: Sequence[mx.array]) -> None:
        if arrays is not self._bound:
            self._layers, self._bound = list(arrays[:-1]), arrays
        self._flags = arrays[-1]

    def flags(self) -> list[mx.array]:
        return [] if self._flags is None else [self._flags]

    def nonfinite_tokens(self) -> list[int]:
        if self._flags is None:
            return []
        flags: Any = self._flags.tolist()  # much faster than NumPy arrays for few rows
        return [row for row, flag in enumerate(flags) if flag] if any(flags) else []

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        pairs = list(pairs)
        for layer, layout in enumerate(self._layouts):
            self._layers[layer] = _ext.copy_pages(layout, self._layers[layer], pairs)
        mx.eval(self._layers)

    def read_pages(self, pages: Sequence[int]) -> PageBytes:
        check_read(self._spec, pages)
        mx.eval(self._layers)
        data = np.empty((len(pages), self._spec.page_bytes), np.uint8)
        for layer, place in zip(self._layers, layer_bytes(self._spec), strict=True):
            span = data[:, place.span]
            span[:] = np.asarray(layer)[list(pages)].reshape(span.shape)
        return data

    def write_pages(self, pages: Sequence[int], data: PageBytes) -> None:
        check_write(self._spec, pages, data)
        mx.eval(self._layers)
        for layer, place in zip(self._layers, layer_bytes(self._spec), strict=True):
            stored = np.asarray(layer)
            stored[list(pages)] = data[:, place.span].reshape(len(pages), *stored.shape[1:])

    @property
    def step(self) -> CpuStep:
        if self._step is None:
            *indices, flags = self.step_values()
            longest = int(indices[2].max(initial=0))
            self._step = CpuStep(len(flags), longest, *map(mx.array, indices))
        return self._step


def _layout(spec: PoolSpec, layer: LayerSpec) -> _ext.PageLayout:
    return _ext.page_layout(
        spec.num_pages,
        layer.num_kv_heads,
        spec.page_size,
        spec.k_format,
        layer.head_dim,
        spec.v_format,
        layer.value_dim,
    )


class CpuBackend:
    name = "cpu"
    has_model_ops = True
    takes_masks = True
    writes_in_place = True
    recurrent_kernels: RecurrentKernels = recurrent
    adapter_tables = None
    compiles_at_launch = False

    def __init__(self, threads: int | None = None, *, exact: bool = False) -> None:
        self._exact = exact
        if threads is not None:
            _ext.set_threads(threads)

    def create_pool(self, spec: PoolSpec) -> CpuPool:
        return CpuPool(spec, exact=self._exact)

    def create_residual_pool(self, spec: PoolSpec, residual: PoolSpec) -> PagedKVCache:
        return CpuResidualCache(CpuPool(spec, exact=self._exact), CpuPool(residual, exact=self._exact))


class CpuResidualCache(ResidualCache[CpuPool]):
    """Attends over quantized and residual pages separately, and joins the partial results."""

    quantized: CpuPool
    residual: CpuPool

    def begin_step(self, metadata: AttentionMetadata) -> None:
        metadata = self._begin(metadata)
        pages, residual = metadata.groups
        self.quantized.begin_group(metadata, pages)
        self.residual.begin_group(metadata, residual)

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        return self.quantized.attend(layer, queries, options, self.residual)
