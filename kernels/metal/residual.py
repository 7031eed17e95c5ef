"""Attention over quantized pages and their residual pages on Metal.

What a row reads of either kind is a run of whole pages, or two. Put one after the other they are a short
sequence of their own, seen up to its end: a row's table is rewritten so on the host, once per step, and the
split kernel runs over it as it is, or for rows of prompts that read the same pages the chunk kernel. The
partial results of both kinds are joined by MLX's own operations.
Positions are then not those of the sequence, so there are no windows here.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..interface import AttendOptions, PoolSpec, refuse_option
from ..metadata import AttentionMetadata, Ints
from ..reference.codecs import hadamard
from ..residual import residual_starts
from ..residual_cache import ResidualCache
from .attention import Parts
from .attention_units import DECODE_TILE, chunk_tokens
from .latents import LATENT_TOKENS
from .launch import padded
from .plan import chunk_rows, cut, divide, num_splits, restore_order
from .pool import MetalPool

_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453
_LOWEST = -1e30  # of the sources: below every logit


@dataclass(frozen=True, slots=True)
class _Run:
    """What rows read of one kind of pages.

    items   [4 * M]  for the kernel; none if ``count``, M, is 0
    plan    [M, 4]   the same on the host
    tiled   as of ``Parts``
    index   [R, S]   parts of each row
    live    [R, S]   which of these there are
    """

    items: mx.array
    plan: Ints
    tiled: int | None
    index: mx.array
    live: mx.array

    @property
    def count(self) -> int:
        return len(self.plan)


@dataclass(frozen=True, slots=True)
class _Route:
    """Rows [R] of the step that are divided alike, and what they read of quantized and of residual pages."""

    rows: Ints
    runs: tuple[_Run, _Run]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Every row's pages of one kind, in front of each other: tables [T, P] and the last position in them,
    [T], -1 where there are none."""

    page_table: Ints
    positions: Ints


class MetalResidualCache(ResidualCache[MetalPool]):
    """Rows of prompts go through the chunk kernel in tiles that end where what they read changes."""

    _kinds: tuple[_Kind, _Kind]
    _tables: tuple[tuple[mx.array, mx.array], tuple[mx.array, mx.array]]  # positions, page_table
    _routes: dict[int, list[_Route]]  # by the tokens of a tile
    _order: mx.array | None

    def begin_step(self, metadata: AttentionMetadata) -> None:
        super().begin_step(metadata)
        self._kinds = _kinds(metadata, self.residual.spec)
        first, second = ((padded(kind.positions), padded(kind.page_table)) for kind in self._kinds)
        self._tables = first, second
        self._routes = {}
        order = restore_order(*self._rows(metadata))
        self._order = None if order is None else mx.array(order)

    def _rows(self, metadata: AttentionMetadata) -> tuple[Ints, Ints]:
        """The step's rows that are their sequences' only ones, and those of prompts."""
        chunks = chunk_rows(metadata)
        return np.setdiff1d(np.arange(metadata.num_tokens, dtype=np.int32), chunks), chunks

    def _routes_of(self, tokens: int) -> list[_Route]:
        """How rows are divided where a tile has so many tokens."""
        if tokens not in self._routes:
            assert self._metadata is not None
            alone, chunks = self._rows(self._metadata)
            # Rows of a sequence that read the same quantized pages read the same residual ones.
            sequences, last = self._metadata.row_sequences.astype(np.int64), self._kinds[0].positions
            first, count = cut(chunks, (sequences * (last.max() + 2) + last)[chunks], tokens)
            quantized, residual = self._kinds
            routes = (
                _Route(alone, (_run(alone, quantized), _run(alone, residual))),
                _Route(
                    chunks, (_tiled(chunks, quantized, first, count), _tiled(chunks, residual, first, count))
                ),
            )
            self._routes[tokens] = [route for route in routes if len(route.rows)]
        return self._routes[tokens]

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        refuse_option("metal", mask=options.mask)
        if options.rotary is not None:
            self.quantized.check_latents(layer, queries, options)
        self.quantized.check_queries(layer, queries, options)
        spec = self.quantized.spec.layers[layer]
        group = queries.shape[1] // spec.num_kv_heads
        tokens = chunk_tokens(spec, group) if options.rotary is None else LATENT_TOKENS
        routes = self._routes_of(tokens)
        outs = [self._attend(layer, queries, route, options) for route in routes]
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs)
        return (out if self._order is None else out[self._order]).astype(queries.dtype)

    def _attend(self, layer: int, queries: mx.array, route: _Route, options: AttendOptions) -> mx.array:
        """Of the rows of one route, float32 [R, Hq, Dv]."""
        spec, rotary = self.quantized.spec.layers[layer], options.rotary
        heads, dim = queries.shape[1], spec.value_dim if rotary is None else spec.head_dim
        top = mx.full((len(route.rows), heads), _LOWEST)
        if (sinks := options.sinks) is not None:
            sinks = sinks.astype(mx.float32) * _LOG2_E
            top = mx.maximum(top, sinks)
        parts = []
        for pool, run, (positions, table) in zip(
            (self.quantized, self.residual), route.runs, self._tables, strict=True
        ):
            if not run.count:
                continue
            wanted = Parts(
                items=run.items,
                plan=run.plan,
                tiled=run.tiled,
                positions=positions,
                page_table=table,
                scale=options.scale,
                softcap=options.softcap,
            )
            found = pool.partials(layer, queries, rotary, wanted)
            tops = mx.where(run.live[..., None], found.stats[run.index][..., 0], _LOWEST)  # [R, S, Hq]
            parts.append((pool, run, found, tops))
            top = mx.maximum(top, tops.max(axis=1))
        total = mx.zeros_like(top) if sinks is None else _exp2(sinks - top)
        out = mx.zeros((len(route.rows), heads, dim))
        for pool, run, found, tops in parts:
            share = mx.where(run.live[..., None], _exp2(tops - top[:, None]), 0.0)
            total = total + (share * found.stats[run.index][..., 1]).sum(axis=1)
            values = mx.where(run.live[..., None, None], found.values[run.index], 0.0)  # not 0 * NaN
            values = (share[..., None] * values).sum(axis=1)
            rotated = pool.rotates_values(layer) if rotary is None else pool.rotates_keys(layer)
            out = out + (hadamard(values) if rotated else values)
        return out / total[..., None]


def _exp2(x: mx.array) -> mx.array:
    return mx.exp(x * _LN_2)


def _kinds(metadata: AttentionMetadata, residual: PoolSpec) -> tuple[_Kind, _Kind]:
    """What each row reads: quantized pages [kept, start), residual pages [0, kept) and [start, its own]."""
    size, layer = metadata.page_size, residual.layers[0]
    assert layer.window is not None
    counts, sequence = np.diff(metadata.q_start), metadata.row_sequences
    after = np.zeros(len(counts), np.int32) if metadata.quantize_after is None else metadata.quantize_after
    positions = metadata.positions
    start = residual_starts(positions, after[sequence], window=layer.window, page_size=size) // size
    kept = np.minimum(start, layer.keep // size)
    pages, shown = metadata.groups
    column = np.arange(pages.page_table.shape[1])
    tables = pages.page_table[sequence]
    own = np.where(column < kept[:, None], column, column + (start - kept)[:, None])
    own = np.minimum(own, positions[:, None] // size)
    earlier = np.minimum(column + kept[:, None], np.maximum(start - 1, 0)[:, None])
    return (
        _Kind(np.take_along_axis(tables, earlier, axis=1), ((start - kept) * size - 1).astype(np.int32)),
        _Kind(
            np.take_along_axis(shown.page_table[sequence], own, axis=1),
            (positions - (start - kept) * size).astype(np.int32),
        ),
    )


def _run(rows: Ints, kind: _Kind) -> _Run:
    """Divide what each row reads of a kind of pages, as rows that are decoded are."""
    tiles = (kind.positions[rows] + DECODE_TILE) // DECODE_TILE  # 0 for -1
    splits = num_splits(tiles)
    items, first = divide(rows, rows, tiles, splits)
    each = np.arange(max(int(splits.max(initial=1)), 1))
    live = each < splits[:, None]
    index = np.where(live, first[:, None] + each, 0).astype(np.int32)
    return _Run(padded(items.ravel()), items, None, mx.array(index), mx.array(live))


def _tiled(rows: Ints, kind: _Kind, first: Ints, count: Ints) -> _Run:
    """A part for each row, in tiles that begin ``first`` and have ``count`` rows: what its rows read of a
    kind of pages is in its last row's table, the longest."""
    live = kind.positions[rows] >= 0
    used = live[first]
    first, count = first[used], count[used]
    out = (np.cumsum(count) - count).astype(np.int32)
    tiles = np.stack([rows[first], count, rows[first + count - 1], out], axis=1).astype(np.int32)
    index = np.where(live, np.cumsum(live) - 1, 0).astype(np.int32)
    return _Run(
        padded(tiles.ravel()), tiles, int(count.sum()), mx.array(index[:, None]), mx.array(live[:, None])
    )
