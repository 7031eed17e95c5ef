"""Attention over quantized pages and their residual pages on Metal.

What a row reads of either kind is a run of whole pages, or two. Put one after the other they are a short
sequence of their own, seen up to its end: a row's table is rewritten so on the host, once per step, and the
split kernel runs over it as it is. The partial results of both kinds are joined by MLX's own operations.
Positions are then not those of the sequence, so there are no windows and no ALiBi here.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..interface import AttendOptions, PoolSpec, refuse_option
from ..metadata import AttentionMetadata, Ints
from ..reference.codecs import hadamard
from ..residual import residual_starts
from ..residual_cache import ResidualCache, refuse_latents
from .attention import Parts
from .attention_units import DECODE_TILE
from .launch import padded
from .plan import divide, num_splits, restore_order
from .pool import MetalPool

_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453
_LOWEST = -1e30  # of the sources: below every logit


@dataclass(frozen=True, slots=True)
class _Run:
    """What rows read of one kind of pages.

    items   [4 * M]  for the kernel; none if ``count``, M, is 0
    index   [R, S]   parts of each row
    live    [R, S]   which of these there are
    """

    items: mx.array
    count: int
    index: mx.array
    live: mx.array


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
    """Rows of prompts go through the kernel that decodes, one by one: slower than tiles of them."""

    _tables: tuple[tuple[mx.array, mx.array], tuple[mx.array, mx.array]]  # positions, page_table
    _routes: list[_Route]
    _order: mx.array | None

    def begin_step(self, metadata: AttentionMetadata) -> None:
        super().begin_step(metadata)
        kinds = _kinds(metadata, self.residual.spec)
        first, second = ((padded(kind.positions), padded(kind.page_table)) for kind in kinds)
        self._tables = first, second
        counts = np.diff(metadata.q_start)
        alone = np.repeat(counts == 1, counts)
        self._routes = []
        for chosen, most in ((alone, None), (~alone, 1)):
            if len(rows := np.flatnonzero(chosen).astype(np.int32)):
                quantized, residual = (_run(rows, kind.positions[rows], most) for kind in kinds)
                self._routes.append(_Route(rows, (quantized, residual)))
        order = restore_order(*(route.rows for route in self._routes))
        self._order = None if order is None else mx.array(order)

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        refuse_option("metal", alibi_slopes=options.alibi_slopes, mask=options.mask)
        refuse_latents(options)
        self.quantized.check_queries(layer, queries, options)
        outs = [self._attend(layer, queries, route, options) for route in self._routes]
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs)
        return (out if self._order is None else out[self._order]).astype(queries.dtype)

    def _attend(self, layer: int, queries: mx.array, route: _Route, options: AttendOptions) -> mx.array:
        """Of the rows of one route, float32 [R, Hq, Dv]."""
        heads, dim = queries.shape[1], self.quantized.spec.layers[layer].value_dim
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
                count=run.count,
                positions=positions,
                page_table=table,
                scale=options.scale,
                softcap=options.softcap,
            )
            found = pool.partials(layer, queries, wanted)
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
            out = out + (hadamard(values) if pool.rotates_values(layer) else values)
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


def _run(rows: Ints, positions: Ints, most: int | None) -> _Run:
    """Divide what each row reads, of which ``positions`` is the last, into at most ``most`` parts."""
    tiles = (positions + DECODE_TILE) // DECODE_TILE  # 0 for -1
    splits = num_splits(tiles) if most is None else np.minimum(tiles, most)
    items, first = divide(rows, rows, tiles, splits)
    each = np.arange(max(int(splits.max()), 1))
    live = each < splits[:, None]
    index = np.where(live, first[:, None] + each, 0).astype(np.int32)
    return _Run(padded(items.ravel()), len(items), mx.array(index), mx.array(live))
