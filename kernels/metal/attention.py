"""Attention of one step on Metal: a decode kernel, and a chunk kernel for prompt rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ..interface import AttendOptions, LayerSpec, PoolSpec
from ..metadata import AttentionMetadata, Ints
from ..visibility import window_start
from .attention_units import CHUNK_SIMDGROUPS, REDUCE_SIMDGROUPS, AttentionConfig
from .launch import KernelLibrary, Launch, padded
from .plan import DecodePlan, plan_chunks, plan_decode
from .units import MIN_ELEMENTS

_LOG2_E = 1.4426950408889634
READ = ((MIN_ELEMENTS,), mx.bool_)


@dataclass(frozen=True, slots=True)
class StoredPages:
    """Pages of one layer: arrays (codes, scales) or (codes,) of K and of V.

    ``after`` orders kernels: it is the output of the last kernel on these pages.
    """

    keys: tuple[mx.array, ...]
    values: tuple[mx.array, ...]
    after: mx.array

    def inputs(self) -> dict[str, mx.array]:
        names = ("codes", "scales")
        return {
            f"{letter}_{name}": array
            for letter, arrays in (("k", self.keys), ("v", self.values))
            for name, array in zip(names, arrays, strict=False)
        } | {"after": self.after}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Request for partial attention. A *part* is the attention of one row over some of its keys.

    items       [4 * M]  (row, row of the page table, first tile of keys, end tile) of each part. With
                ``tiled``: (first row, number of rows, row of the page table, index of the first part)
    positions   [T]      last position that each row sees
    seen_since  [T]      first position that each row sees, apart from the first ``keep``; None: 0
    page_table  [T, P]   pages of each row
    """

    items: mx.array
    plan: Ints
    tiled: int | None
    positions: mx.array
    seen_since: mx.array | None
    keep: int
    page_table: mx.array

    @property
    def count(self) -> int:
        return len(self.plan)

    def inputs(self) -> dict[str, mx.array]:
        of_rows = {"positions": self.positions, "page_table": self.page_table}
        return of_rows if self.seen_since is None else of_rows | {"seen_since": self.seen_since}


@dataclass(frozen=True, slots=True)
class Partials:
    """Results of M parts, to be joined.

    values   [M, Hq, Dv]  sums of V weighted by 2^(logit - top)
    stats    [M, Hq, 4]   top (the largest logit), the sum of weights, and two unused numbers
    """

    values: mx.array
    stats: mx.array
    read: mx.array


@dataclass(frozen=True, slots=True)
class Attended:
    """Result of attention, ``out`` [T, Hq, Dv].

    Later writes of the pages must wait for ``read``.
    """

    out: mx.array
    read: mx.array


@dataclass(frozen=True, slots=True)
class _Routes:
    decode: DecodePlan
    num_tiles: int
    items: mx.array
    joins: mx.array
    tiles: mx.array


@dataclass(slots=True)
class MetalStep:
    """Arrays of a step that its layers share."""

    metadata: AttentionMetadata
    positions: mx.array
    page_table: mx.array
    routes: dict[tuple[int | None, ...], Any] = field(default_factory=dict)
    starts: dict[int, mx.array] = field(default_factory=dict)

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> MetalStep:
        return cls(metadata, padded(metadata.seen_until), padded(metadata.only_group().page_table))

    def since(self, window: int) -> mx.array:
        if window not in self.starts:
            self.starts[window] = padded(window_start(self.metadata.positions, window).astype(np.int32))
        return self.starts[window]


@dataclass(frozen=True, slots=True)
class _Layer:
    config: AttentionConfig
    options: AttendOptions
    fixed: dict[str, mx.array]

    def serves(self, num_heads: int, options: AttendOptions) -> bool:
        mine, config = self.options, self.config
        return config.group * config.layer.num_kv_heads == num_heads and (
            mine is options
            or (
                mine.scale == options.scale
                and mine.softcap == options.softcap
                and mine.sinks is options.sinks
            )
        )


class PagedAttention:
    def __init__(self, spec: PoolSpec, library: KernelLibrary) -> None:
        self._spec = spec
        self._library = library
        self._layers: dict[tuple[int, bool, bool], _Layer] = {}

    def attend(
        self,
        step: MetalStep,
        layer: int,
        queries: mx.array,
        pages: StoredPages,
        options: AttendOptions,
    ) -> Attended:
        """Return attention [T, Hq, Dv] of queries [T, Hq, D], in their dtype; masks are not supported."""
        spec = self._spec.layers[layer]
        tokens, num_heads = step.metadata.num_tokens, queries.shape[1]
        window = None if step.metadata.last is None else spec.window
        of_layer = self._layer(layer, num_heads, options, bounded=window is not None)
        inputs = {
            **of_layer.fixed,
            **pages.inputs(),
            "queries": queries,
            "positions": step.positions,
            "page_table": step.page_table,
        }
        if window is not None:
            inputs["seen_since"] = step.since(window)
        routes = self._routes(step, spec, of_layer.config)
        if not routes.num_tiles:
            return self._decode(of_layer, routes, inputs)
        inputs["decoded"] = queries
        if len(routes.decode.items):
            decoded = self._decode(of_layer, routes, inputs)
            inputs["decoded"], inputs["after"] = decoded.out, decoded.read
        inputs["tiles"] = routes.tiles
        output = ((tokens, num_heads, spec.value_dim), queries.dtype)
        launch = _launch(of_layer.config, CHUNK_SIMDGROUPS, routes.num_tiles, output)
        return Attended(*self._run(of_layer, "chunk", inputs, launch))

    def partials(
        self, layer: int, queries: mx.array, pages: StoredPages, parts: Parts, options: AttendOptions
    ) -> Partials:
        """Compute ``parts``; the results are not normalized, and V is still rotated."""
        bounded = parts.seen_since is not None
        of_layer = self._layer(layer, queries.shape[1], options, bounded=bounded, parts=parts)
        inputs = {
            **of_layer.fixed,
            **pages.inputs(),
            **parts.inputs(),
            "queries": queries,
        }
        if parts.tiled is None:
            return Partials(*self._split(of_layer, inputs | {"items": parts.items}, parts.count))
        config = of_layer.config
        launch = _launch(config, CHUNK_SIMDGROUPS, parts.count, *_part_outputs(config, parts.tiled))
        return Partials(*self._run(of_layer, "split_chunk", inputs | {"tiles": parts.items}, launch))

    def _decode(self, of_layer: _Layer, routes: _Routes, inputs: dict[str, mx.array]) -> Attended:
        config, dtype = of_layer.config, inputs["queries"].dtype
        heads, dim = config.layer.num_kv_heads * config.group, config.layer.value_dim
        count, rows = len(routes.decode.items), len(routes.decode.joins)
        inputs["items"] = routes.items
        if not rows:
            launch = _launch(config, config.decode_simdgroups, count, ((count, heads, dim), dtype))
            return Attended(*self._run(of_layer, "decode", inputs, launch))
        partial, stats, read = self._split(of_layer, inputs, count)
        launch = reduce_launch((rows, heads, dim), dtype)
        joined = inputs | {"rows": routes.joins, "partial": partial, "stats": stats}
        (out,) = self._run(of_layer, "reduce", joined, launch)
        return Attended(out, read)

    def _layer(
        self,
        layer: int,
        num_heads: int,
        options: AttendOptions,
        *,
        bounded: bool,
        parts: Parts | None = None,
    ) -> _Layer:
        key = layer, parts is not None, bounded
        found = self._layers.get(key)
        if found is not None and found.serves(num_heads, options):
            return found
        spec = self._spec.layers[layer]
        config = AttentionConfig(
            layer=spec if parts is None else replace(spec, window=None, keep=parts.keep),
            group=num_heads // spec.num_kv_heads,
            page_size=self._spec.page_size,
            k_format=self._spec.k_format,
            v_format=self._spec.v_format,
            sinks=options.sinks is not None,
            softcap=options.softcap is not None,
            bounded=bounded,
        )
        fixed = {"params": device_params(options.scale, options.softcap)}
        if options.sinks is not None:
            fixed["sinks"] = per_head("sinks", options.sinks, num_heads)
        mx.eval(*fixed.values())
        made = self._layers[key] = _Layer(config, options, fixed)
        return made

    def _split(self, of_layer: _Layer, inputs: dict[str, mx.array], count: int) -> list[mx.array]:
        config = of_layer.config
        launch = _launch(config, config.decode_simdgroups, count, *_part_outputs(config, count))
        return self._run(of_layer, "split", inputs, launch)

    def _run(
        self, of_layer: _Layer, kind: str, inputs: dict[str, mx.array], launch: Launch
    ) -> list[mx.array]:
        config = of_layer.config
        return self._library.made((config, kind), lambda: config.unit(kind))(inputs, launch)

    def _routes(self, step: MetalStep, spec: LayerSpec, config: AttentionConfig) -> _Routes:
        chunk_tokens = config.chunk_tokens
        key = (spec.window, spec.keep, chunk_tokens)
        if key not in step.routes:
            decode = plan_decode(step.metadata, spec.window, spec.keep)
            tiles = plan_chunks(step.metadata, chunk_tokens)
            step.routes[key] = _Routes(
                decode,
                len(tiles),
                items=padded(decode.items.ravel()),
                joins=padded(decode.joins.ravel()),
                tiles=padded(tiles.ravel()),
            )
        routes: _Routes = step.routes[key]
        return routes


def _launch(
    config: AttentionConfig, simdgroups: int, count: int, *outputs: tuple[tuple[int, ...], mx.Dtype]
) -> Launch:
    threads = 32 * simdgroups
    return Launch(
        grid=(threads * count, config.layer.num_kv_heads, 1),
        threadgroup=(threads, 1, 1),
        outputs=(*outputs, READ),
    )


def reduce_launch(shape: tuple[int, int, int], dtype: mx.Dtype) -> Launch:
    """Return the launch that joins parts of rows; the result is [rows, heads, dim]."""
    threads = 32 * REDUCE_SIMDGROUPS
    rows, heads, _ = shape
    return Launch(grid=(threads, heads, rows), threadgroup=(threads, 1, 1), outputs=((shape, dtype),))


def _part_outputs(config: AttentionConfig, count: int) -> tuple[tuple[tuple[int, ...], mx.Dtype], ...]:
    heads = config.layer.num_kv_heads * config.group
    return ((count, heads, config.layer.value_dim), mx.float32), ((count, heads, 4), mx.float32)


@functools.lru_cache(maxsize=64)
def device_params(scale: float, softcap: float | None) -> mx.array:
    values = np.zeros(MIN_ELEMENTS, np.float32)
    values[0] = scale * _LOG2_E if softcap is None else scale
    if softcap is not None:
        values[1], values[2] = 1 / softcap, softcap * _LOG2_E
    return mx.array(values)


def per_head(name: str, array: mx.array, num_heads: int) -> mx.array:
    if array.shape != (num_heads,):
        raise ValueError(f"{name} must be ({num_heads},), one per query head, got {array.shape}")
    return mx.pad(array.astype(mx.float32), (0, max(0, MIN_ELEMENTS - num_heads)))
