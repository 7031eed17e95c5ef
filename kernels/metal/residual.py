"""Attention over quantized pages and 16-bit residual pages on Metal.

For each row, the pages of one kind form a shorter sequence, over which the usual kernels run. MLX's
operations join the results of both kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..formats import page_format
from ..interface import AttendOptions, refuse_mask
from ..metadata import AttentionMetadata, Ints
from ..reference.codecs import hadamard
from ..residual_cache import ResidualCache
from ..visibility import window_start
from .attention import Parts
from .attention_units import DECODE_TILE, chunk_tokens
from .latents import LATENT_TOKENS
from .launch import padded
from .plan import bounded_tiles, chunk_rows, cut, divide, num_splits, restore_order
from .pool import MetalPool

_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453
_LOWEST = -1e30  # below every logit; the Metal sources have the same number


@dataclass(frozen=True, slots=True)
class _Run:
    parts: Parts
    index: mx.array
    live: mx.array


@dataclass(frozen=True, slots=True)
class _Route:
    rows: Ints
    runs: tuple[_Run, _Run]


@dataclass(frozen=True)
class _Kind:
    page_table: Ints
    positions: Ints
    seen_since: Ints | None
    keep: int

    @property
    def live(self) -> NDArray[np.bool_]:
        return self.positions >= (0 if self.seen_since is None else self.seen_since)

    @property
    def tiles(self) -> Ints:
        if self.seen_since is None:
            return (self.positions + DECODE_TILE) // DECODE_TILE
        return np.where(self.live, bounded_tiles(self.positions, self.seen_since, self.keep), 0)

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        since = None if self.seen_since is None else padded(self.seen_since)
        arrays = {"page_table": padded(self.page_table), "positions": padded(self.positions)}
        return {**arrays, "seen_since": since, "keep": self.keep}

    def parts(self, plan: Ints, *, tiled: int | None = None) -> Parts:
        return Parts(items=padded(plan.ravel()), plan=plan, tiled=tiled, **self._arrays)


Kinds = tuple[_Kind, _Kind]


@dataclass(frozen=True, slots=True)
class _Step:
    kinds: Kinds
    routes: dict[int, list[_Route]] = field(default_factory=dict)


class MetalResidualCache(ResidualCache[MetalPool]):
    _steps: dict[tuple[int | None, int], _Step]
    _order: mx.array | None

    def begin_step(self, metadata: AttentionMetadata) -> None:
        super().begin_step(metadata)
        self._steps = {}
        order = restore_order(*_alone_and_chunks(metadata))
        self._order = None if order is None else mx.array(order)

    def _step(self, layer: int) -> _Step:
        window, keep = self.quantized.spec.layers[layer].window, self.residual.spec.layers[layer].keep
        if (window, keep) not in self._steps:
            if self._metadata is None:
                raise ValueError("no step has begun; call begin_step first")
            self._steps[window, keep] = _Step(_kinds(self._metadata, window, keep))
        return self._steps[window, keep]

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        refuse_mask("metal", options.mask)
        if options.rotary is not None:
            self.quantized.check_latents(layer, queries, options)
        self.quantized.check_queries(layer, queries, options)
        spec = self.quantized.spec.layers[layer]
        group = queries.shape[1] // spec.num_kv_heads
        tokens = chunk_tokens(spec, group) if options.rotary is None else LATENT_TOKENS
        step = self._step(layer)
        if tokens not in step.routes:
            assert self._metadata is not None
            step.routes[tokens] = _routes(self._metadata, step.kinds, tokens)
        outs = [self._attend(layer, queries, route, options) for route in step.routes[tokens]]
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs)
        return (out if self._order is None else out[self._order]).astype(queries.dtype)

    def _attend(self, layer: int, queries: mx.array, route: _Route, options: AttendOptions) -> mx.array:
        spec, rotary = self.quantized.spec.layers[layer], options.rotary
        heads, dim = queries.shape[1], spec.value_dim if rotary is None else spec.head_dim
        top = mx.full((len(route.rows), heads), _LOWEST)
        if (sinks := options.sinks) is not None:
            sinks = sinks.astype(mx.float32) * _LOG2_E
            top = mx.maximum(top, sinks)
        parts, of_parts = [], replace(options, sinks=None)
        for pool, run in zip((self.quantized, self.residual), route.runs, strict=True):
            if not run.parts.count:
                continue
            found = pool.partials(layer, queries, run.parts, of_parts)
            tops = mx.where(run.live[..., None], found.stats[run.index][..., 0], _LOWEST)  # [R, S, Hq]
            parts.append((pool, run, found, tops))
            top = mx.maximum(top, tops.max(axis=1))
        total = mx.zeros_like(top) if sinks is None else _exp2(sinks - top)
        out = mx.zeros((len(route.rows), heads, dim))
        for pool, run, found, tops in parts:
            share = mx.where(run.live[..., None], _exp2(tops - top[:, None]), 0.0)
            total = total + (share * found.stats[run.index][..., 1]).sum(axis=1)
            # Replace invalid values, because a weight of 0 would keep NaN.
            values = mx.where(run.live[..., None, None], found.values[run.index], 0.0)
            values = (share[..., None] * values).sum(axis=1)
            stored = page_format(pool.spec.v_format if rotary is None else pool.spec.k_format)
            out = out + (hadamard(values) if stored.rotates else values)
        return out / total[..., None]


def _exp2(x: mx.array) -> mx.array:
    return mx.exp(x * _LN_2)


def _kinds(metadata: AttentionMetadata, window: int | None, keep: int) -> Kinds:
    size, (positions, sequence) = metadata.page_size, (metadata.positions, metadata.row_sequences)
    pages, shown = metadata.groups
    assert shown.starts is not None
    start = shown.starts // size
    skipped, kept = np.minimum(start, keep // size), np.minimum(start, -(-keep // size))
    column = np.arange(pages.page_table.shape[1])
    own = np.where(column < kept[:, None], column, column + (start - kept)[:, None])
    own = np.minimum(own, metadata.seen_until[:, None] // size)
    earlier = np.minimum(column + skipped[:, None], np.maximum(start - 1, 0)[:, None])
    seen_since: tuple[Ints | None, Ints | None] = None, None
    if window is not None:
        low = window_start(positions, window)
        seen_since = (
            (np.maximum(low, keep) - skipped * size).astype(np.int32),
            (np.maximum(low, start * size) - (start - kept) * size).astype(np.int32),
        )
    return (
        _Kind(
            np.take_along_axis(pages.page_table[sequence], earlier, axis=1),
            ((start - skipped) * size - 1).astype(np.int32),
            seen_since[0],
            keep=0,
        ),
        _Kind(
            np.take_along_axis(shown.page_table[sequence], own, axis=1),
            (metadata.seen_until - (start - kept) * size).astype(np.int32),
            seen_since[1],
            keep=0 if window is None else keep,
        ),
    )


def _alone_and_chunks(metadata: AttentionMetadata) -> tuple[Ints, Ints]:
    chunks = chunk_rows(metadata)
    return np.setdiff1d(np.arange(metadata.num_tokens, dtype=np.int32), chunks), chunks


def _routes(metadata: AttentionMetadata, kinds: Kinds, tokens: int) -> list[_Route]:
    alone, chunks = _alone_and_chunks(metadata)
    quantized, residual = kinds
    sequences, last = metadata.row_sequences.astype(np.int64), quantized.positions
    first, count = cut(chunks, (sequences * (last.max() + 2) + last)[chunks], tokens)
    routes = (
        _Route(alone, (_run(alone, quantized), _run(alone, residual))),
        _Route(chunks, (_tiled(chunks, quantized, first, count), _tiled(chunks, residual, first, count))),
    )
    return [route for route in routes if len(route.rows)]


def _run(rows: Ints, kind: _Kind) -> _Run:
    tiles = kind.tiles[rows]
    splits = num_splits(tiles)
    items, first = divide(rows, rows, tiles, splits)
    each = np.arange(max(int(splits.max(initial=1)), 1))
    live = each < splits[:, None]
    index = np.where(live, first[:, None] + each, 0).astype(np.int32)
    return _Run(kind.parts(items), mx.array(index), mx.array(live))


def _tiled(rows: Ints, kind: _Kind, first: Ints, count: Ints) -> _Run:
    live = kind.live[rows]
    used = live[first]
    parted = np.repeat(used, count)
    first, count = first[used], count[used]
    out = (np.cumsum(count) - count).astype(np.int32)
    tiles = np.stack([rows[first], count, rows[first + count - 1], out], axis=1).astype(np.int32)
    index = np.where(parted, np.cumsum(parted) - 1, 0).astype(np.int32)
    parts = kind.parts(tiles, tiled=int(count.sum()))
    return _Run(parts, mx.array(index[:, None]), mx.array(live[:, None]))
