"""Attention of one step: decode rows to the decode kernel, chunk rows to the tiled one.

Device arrays of the step's metadata are made when first needed and shared by every layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import mlx.core as mx
import numpy as np

from ..interface import AttendOptions, LayerSpec, PoolSpec
from ..metadata import AttentionMetadata
from .attention_units import CHUNK_SIMDGROUPS, REDUCE_SIMDGROUPS, AttentionConfig
from .launch import KernelLibrary, Launch, padded
from .plan import (
    ChunkPlan,
    DecodePlan,
    plan_chunks,
    plan_decode,
    restore_order,
)
from .units import MIN_ELEMENTS, Unit

_LOG2_E = 1.4426950408889634
READ = ((MIN_ELEMENTS,), mx.bool_)  # shape and type of ``Attended.read``


@dataclass(frozen=True, slots=True)
class StoredPages:
    """Arrays of one layer: (codes, scales) or (codes,) of K and of V. ``after`` is what the last kernel on
    them made, where only that orders reads after writes."""

    keys: tuple[mx.array, ...]
    values: tuple[mx.array, ...]
    after: mx.array | None = None

    def inputs(self) -> dict[str, mx.array]:
        names = ("codes", "scales")
        return {
            f"{letter}_{name}": array
            for letter, arrays in (("k", self.keys), ("v", self.values))
            for name, array in zip(names, arrays, strict=False)
        } | ({} if self.after is None else {"after": self.after})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What ``PagedAttention.partials`` computes.

    items       [4 * M]  (row, row of the table, first tile, end tile) of each part; of tiles of rows instead
                (first row, rows, row of the table, first part), a part for each row
    count       M
    tiled       how many parts tiles of rows have together; None: a part for each of ``items``
    positions   [T]      position of each row
    page_table  [T, P]   its pages
    """

    items: mx.array
    count: int
    tiled: int | None
    positions: mx.array
    page_table: mx.array
    scale: float
    softcap: float | None


@dataclass(frozen=True, slots=True)
class Partials:
    """values [M, Hq, Dv], weighted by 2^(logit - top); stats [M, Hq, 4]: top, the sum of weights, -, -.
    ``read``: as of ``Attended``."""

    values: mx.array
    stats: mx.array
    read: mx.array | None


@dataclass(frozen=True, slots=True)
class Attended:
    """out [T, Hq, Dv]; ``read`` is what later writes of the pages must wait for, where pages have an
    ``after``."""

    out: mx.array
    read: mx.array | None


@dataclass(frozen=True, slots=True)
class _Routes:
    """Plans for one window and tile size, and their arrays on the device."""

    decode: DecodePlan
    chunks: ChunkPlan
    items: mx.array
    joins: mx.array
    tiles: mx.array
    order: mx.array | None


@dataclass(slots=True)
class _Step:
    metadata: AttentionMetadata
    positions: mx.array
    page_table: mx.array
    routes: dict[tuple[int | None, int, int], _Routes] = field(default_factory=dict)


class PagedAttention:
    """Launches the attention kernels of a pool."""

    def __init__(self, spec: PoolSpec, library: KernelLibrary) -> None:
        self._spec = spec
        self._library = library
        self._step: _Step | None = None
        self._units: dict[tuple[AttentionConfig, str], Unit] = {}

    def begin_step(self, metadata: AttentionMetadata) -> None:
        self._step = _Step(metadata, padded(metadata.positions), padded(metadata.only_group().page_table))

    def attend(
        self,
        layer: int,
        queries: mx.array,
        pages: StoredPages,
        options: AttendOptions,
    ) -> Attended:
        """queries [T, Hq, D] -> [T, Hq, Dv] in their dtype; no mask."""
        sinks, slopes = options.sinks, options.alibi_slopes
        step, spec = self._begun, self._spec.layers[layer]
        tokens, num_heads = step.metadata.num_tokens, queries.shape[1]
        if queries.shape != (tokens, num_heads, spec.head_dim) or num_heads % spec.num_kv_heads:
            raise ValueError(
                f"queries must be ({tokens}, a multiple of {spec.num_kv_heads}, {spec.head_dim}), "
                f"got {queries.shape}"
            )
        config = AttentionConfig(
            layer=spec,
            group=num_heads // spec.num_kv_heads,
            page_size=self._spec.page_size,
            k_format=self._spec.k_format,
            v_format=self._spec.v_format,
            sinks=sinks is not None,
            softcap=options.softcap is not None,
            alibi=slopes is not None,
            ordered=pages.after is not None,
        )
        inputs = pages.inputs() | {
            "queries": queries,
            "positions": step.positions,
            "page_table": step.page_table,
            "params": device_params(options.scale, options.softcap),
        }
        for name, array in (("sinks", sinks), ("slopes", slopes)):
            if array is not None:
                inputs[name] = per_head(name, array, num_heads)
        routes = self._routes(spec, config.chunk_tokens)
        outs = []
        if len(routes.decode.items):
            out, read = self._decode(config, routes, inputs)
            inputs |= {} if read is None else {"after": read}
            outs.append(out)
        if len(routes.chunks.tiles):
            out, read = self._chunks(config, routes, inputs)
            outs.append(out)
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs)
        return Attended(out if routes.order is None else out[routes.order], read)

    def partials(self, layer: int, queries: mx.array, pages: StoredPages, parts: Parts) -> Partials:
        """Attention of each of ``parts`` to the keys of its tiles, not normalized, V still rotated. Every
        row stands for a sequence of its own, whose positions and table are those of ``parts``; it sees
        all up to its position, whatever the layer's window."""
        spec = self._spec.layers[layer]
        config = AttentionConfig(
            layer=replace(spec, window=None, keep=0),
            group=queries.shape[1] // spec.num_kv_heads,
            page_size=self._spec.page_size,
            k_format=self._spec.k_format,
            v_format=self._spec.v_format,
            sinks=False,
            softcap=parts.softcap is not None,
            alibi=False,
            ordered=pages.after is not None,
        )
        inputs = pages.inputs() | {
            "queries": queries,
            "positions": parts.positions,
            "page_table": parts.page_table,
            "params": device_params(parts.scale, parts.softcap),
        }
        if parts.tiled is None:
            values, stats, *read = self._split(config, inputs | {"items": parts.items}, parts.count)
            return Partials(values, stats, _made(read))
        launch = _chunk_launch(config, parts.count, *_part_outputs(config, parts.tiled))
        tiles = inputs | {"tiles": parts.items}
        values, stats, *read = self._library.run(self._unit(config, "split_chunk"), tiles, launch)
        return Partials(values, stats, _made(read))

    def _split(self, config: AttentionConfig, inputs: dict[str, mx.array], count: int) -> list[mx.array]:
        launch = _decode_launch(config, count, *_part_outputs(config, count))
        return self._library.run(self._unit(config, "split"), inputs, launch)

    def _decode(
        self, config: AttentionConfig, routes: _Routes, inputs: dict[str, mx.array]
    ) -> tuple[mx.array, mx.array | None]:
        """Outputs of the rows in ``routes.decode.rows``, and ``Attended.read``."""
        spec, dtype = config.layer, inputs["queries"].dtype
        count, heads, rows = (
            len(routes.decode.items),
            spec.num_kv_heads * config.group,
            len(routes.decode.joins),
        )
        items = inputs | {"items": routes.items}
        if not rows:
            launch = _decode_launch(config, count, ((count, heads, spec.value_dim), dtype))
            out, *read = self._library.run(self._unit(config, "decode"), items, launch)
            return out, _made(read)
        partial, stats, *read = self._split(config, items, count)
        threads = 32 * REDUCE_SIMDGROUPS
        launch = Launch(
            grid=(threads, heads, rows),
            threadgroup=(threads, 1, 1),
            outputs=(((rows, heads, spec.value_dim), dtype),),
        )
        joined = inputs | {"rows": routes.joins, "partial": partial, "stats": stats}
        (out,) = self._library.run(self._unit(config, "reduce"), joined, launch)
        return out, _made(read)

    def _chunks(
        self, config: AttentionConfig, routes: _Routes, inputs: dict[str, mx.array]
    ) -> tuple[mx.array, mx.array | None]:
        """Outputs of the rows in ``routes.chunks.rows``, and ``Attended.read``."""
        count, spec = len(routes.chunks.tiles), config.layer
        shape = (len(routes.chunks.rows), spec.num_kv_heads * config.group, spec.value_dim)
        launch = _chunk_launch(config, count, (shape, inputs["queries"].dtype))
        tiles = inputs | {"tiles": routes.tiles}
        out, *read = self._library.run(self._unit(config, "chunk"), tiles, launch)
        return out, _made(read)

    def _unit(self, config: AttentionConfig, kind: str) -> Unit:
        """The kernel's text, put together once per configuration."""
        make: dict[str, Callable[[], Unit]] = {
            "decode": partial(config.decode_unit, split=False),
            "split": partial(config.decode_unit, split=True),
            "reduce": config.reduce_unit,
            "chunk": partial(config.chunk_unit, split=False),
            "split_chunk": partial(config.chunk_unit, split=True),
        }
        if (config, kind) not in self._units:
            self._units[config, kind] = make[kind]()
        return self._units[config, kind]

    def _routes(self, spec: LayerSpec, chunk_tokens: int) -> _Routes:
        step, key = self._begun, (spec.window, spec.keep, chunk_tokens)
        if key not in step.routes:
            decode = plan_decode(step.metadata, spec.window, spec.keep)
            chunks = plan_chunks(step.metadata, chunk_tokens)
            order = restore_order(decode.rows, chunks.rows)
            step.routes[key] = _Routes(
                decode,
                chunks,
                items=padded(decode.items.ravel()),
                joins=padded(decode.joins.ravel()),
                tiles=padded(chunks.tiles.ravel()),
                order=None if order is None else mx.array(order),
            )
        return step.routes[key]

    @property
    def _begun(self) -> _Step:
        if self._step is None:
            raise ValueError("no step has begun; call begin_step first")
        return self._step


def _decode_launch(config: AttentionConfig, count: int, *outputs: tuple[tuple[int, ...], mx.Dtype]) -> Launch:
    """One threadgroup per item and KV head."""
    threads = 32 * config.decode_simdgroups
    return Launch(
        grid=(threads * count, config.layer.num_kv_heads, 1),
        threadgroup=(threads, 1, 1),
        outputs=outputs + (READ,) * config.ordered,
    )


def _chunk_launch(config: AttentionConfig, count: int, *outputs: tuple[tuple[int, ...], mx.Dtype]) -> Launch:
    """One threadgroup per tile and KV head."""
    threads = 32 * CHUNK_SIMDGROUPS
    return Launch(
        grid=(threads * count, config.layer.num_kv_heads, 1),
        threadgroup=(threads, 1, 1),
        outputs=outputs + (READ,) * config.ordered,
    )


def _part_outputs(config: AttentionConfig, count: int) -> tuple[tuple[tuple[int, ...], mx.Dtype], ...]:
    """The arrays of ``Partials``."""
    heads = config.layer.num_kv_heads * config.group
    return ((count, heads, config.layer.value_dim), mx.float32), ((count, heads, 4), mx.float32)


def _made(read: list[mx.array]) -> mx.array | None:
    return read[0] if read else None


@functools.lru_cache(maxsize=64)
def device_params(scale: float, softcap: float | None) -> mx.array:
    """``params`` of sources/attention.metal."""
    values = np.zeros(MIN_ELEMENTS, np.float32)
    values[0] = scale * _LOG2_E if softcap is None else scale
    if softcap is not None:
        values[1], values[2] = 1 / softcap, softcap * _LOG2_E
    return mx.array(values)


def per_head(name: str, array: mx.array, num_heads: int) -> mx.array:
    """One float32 per query head, padded for the device."""
    if array.shape != (num_heads,):
        raise ValueError(f"{name} must be ({num_heads},), one per query head, got {array.shape}")
    return mx.pad(array.astype(mx.float32), (0, max(0, MIN_ELEMENTS - num_heads)))
