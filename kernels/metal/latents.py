"""Attention over latents (MLA) on Metal. A row is a pair of a token and a query head.

A decoded token with many keys is *split*: several threadgroups each read some of its keys, and a further
kernel joins their results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..interface import AttendOptions, LayerSpec, PoolSpec
from ..metadata import AttentionMetadata, Ints
from .attention import (
    READ,
    Attended,
    MetalStep,
    Partials,
    Parts,
    StoredPages,
    device_params,
    per_head,
    reduce_launch,
)
from .latent_units import LatentConfig
from .launch import Kernel, KernelLibrary, Launch, padded
from .plan import divide, joins_of, num_splits, num_tiles, restore_order

LATENT_TOKENS = 64
"""Largest number of tokens in a tile of an MLA prompt with residual pages; tokens further apart read
different pages."""

ALL_TILES = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """Launches of a step. An item is the work of one threadgroup.

    whole   [N, 8]  items with final outputs
    split   [M, 8]  items with partial outputs; M is 0 if no token is split
    joins   [R, 4]  (first part, number of parts, 0, 0) of each token in ``rows``
    rows    [R]     tokens that ``split`` computes
    others  [T - R] tokens that ``whole`` computes, in the order of their outputs
    """

    whole: Ints
    split: Ints
    joins: Ints
    parts: int
    rows: Ints
    others: Ints


def latent_splits(tiles: Ints, heads_tiles: int) -> Ints:
    splits = num_splits(tiles)
    return np.minimum(splits, -(-2 * splits // heads_tiles)).astype(np.int32)


def plan_latents(metadata: AttentionMetadata, layer: LayerSpec, *, num_heads: int, rows: int) -> LatentPlan:
    """Plan the launches of a step, with ``rows`` (token, head) pairs per threadgroup.

    The splits of a token depend only on its own sequence.
    """
    counts = np.diff(metadata.q_start)
    sequences = np.flatnonzero(counts == 1).astype(np.int32)
    alone = metadata.q_start[sequences]
    tiles = num_tiles(metadata.positions[alone], layer.window, layer.keep)
    parts, first = divide(alone, sequences, tiles, latent_splits(tiles, -(-num_heads // rows)))
    is_whole = counts > 1
    if len(parts) == len(alone):
        is_whole[:] = True
        parts, first, alone = parts[:0], first[:0], alone[:0]
    whole = np.flatnonzero(is_whole).astype(np.int32)
    lengths = counts[whole]
    return LatentPlan(
        _cut(metadata, whole, np.cumsum(lengths) - lengths, num_heads=num_heads, rows=rows),
        head_tiles(parts, num_heads=num_heads, rows=rows),
        joins_of(first, len(parts)),
        len(parts),
        alone,
        np.flatnonzero(np.repeat(is_whole, counts)).astype(np.int32),
    )


def head_tiles(parts: Ints, *, num_heads: int, rows: int) -> Ints:
    first = np.tile(np.arange(0, num_heads, rows), len(parts))
    at = np.repeat(np.arange(len(parts)), -(-num_heads // rows))
    row, sequence, begin, end = parts[at].T
    count = np.minimum(rows, num_heads - first)
    return np.stack([row, first, count, sequence, at, begin, end, np.zeros_like(at)], 1).astype(np.int32)


def _cut(metadata: AttentionMetadata, sequences: Ints, outs: Ints, *, num_heads: int, rows: int) -> Ints:
    runs = metadata.q_start[sequences], np.diff(metadata.q_start)[sequences], sequences, outs
    return row_tiles(np.stack(runs, axis=1), num_heads=num_heads, rows=rows)


def row_tiles(runs: Ints, *, num_heads: int, rows: int) -> Ints:
    first, lengths, sequences, outs = runs.T
    totals = lengths * num_heads
    counts = -(-totals // rows)
    owner = np.repeat(np.arange(len(runs)), counts)
    flat = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * rows
    token, head = flat // num_heads, flat % num_heads
    items = np.zeros((len(owner), 8), np.int32)
    items[:, 0] = first[owner] + token
    items[:, 1] = head
    items[:, 2] = np.minimum(rows, totals[owner] - flat)
    items[:, 3] = sequences[owner]
    items[:, 4] = outs[owner] + token
    items[:, 6] = ALL_TILES
    return items


@dataclass(frozen=True, slots=True)
class _Route:
    plan: LatentPlan
    whole: mx.array
    split: mx.array
    joins: mx.array
    order: mx.array | None


class LatentAttention:
    def __init__(self, spec: PoolSpec, library: KernelLibrary) -> None:
        self._spec = spec
        self._library = library

    def attend(
        self,
        step: MetalStep,
        layer: int,
        queries: mx.array,
        rotary: mx.array,
        pages: StoredPages,
        options: AttendOptions,
    ) -> Attended:
        """Return attention [T, Hq, R] of queries [T, Hq, R] and rotary queries [T, Hq, P].

        R is the width of latents, P the width of rotary keys.
        """
        sinks = options.sinks is not None
        config = self._config(self._spec.layers[layer], queries.shape[1], sinks=sinks)
        inputs = self._inputs(queries, rotary, pages, options.scale) | {
            "positions": step.positions,
            "page_table": step.page_table,
        }
        if options.sinks is not None:
            inputs["sinks"] = per_head("sinks", options.sinks, config.num_heads)
        route = self._route(step, config)
        plan, outs, read = route.plan, [], pages.after
        if plan.parts:
            partial, stats, read = self._split(
                config, inputs | {"items": route.split}, len(plan.split), plan.parts
            )
            joined = inputs | {"rows": route.joins, "partial": partial, "stats": stats}
            launch = reduce_launch((len(plan.rows), config.num_heads, queries.shape[2]), queries.dtype)
            outs += self._kernel(config, "reduce")(joined, launch)
        if len(plan.whole):
            inputs["after"] = read
            launch = _launch(config, len(plan.whole), ((len(plan.others), *queries.shape[1:]), queries.dtype))
            whole = inputs | {"items": route.whole}
            out, read = self._kernel(config, "whole")(whole, launch)
            outs.append(out)
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs)
        out = out if route.order is None else out[route.order]
        return Attended(out, read)

    def partials(
        self,
        layer: int,
        queries: mx.array,
        rotary: mx.array,
        pages: StoredPages,
        parts: Parts,
        options: AttendOptions,
    ) -> Partials:
        """Compute ``parts`` over latents; values are [M, Hq, R]."""
        spec = replace(self._spec.layers[layer], window=None, keep=parts.keep)
        config = self._config(spec, queries.shape[1], sinks=False, bounded=parts.seen_since is not None)
        cut = head_tiles if parts.tiled is None else row_tiles
        items = cut(parts.plan, num_heads=config.num_heads, rows=config.rows)
        inputs = self._inputs(queries, rotary, pages, options.scale) | parts.inputs()
        inputs["items"] = padded(items.ravel())
        count = parts.count if parts.tiled is None else parts.tiled
        return Partials(*self._split(config, inputs, len(items), count))

    def _config(
        self, layer: LayerSpec, num_heads: int, *, sinks: bool, bounded: bool = False
    ) -> LatentConfig:
        return LatentConfig(
            layer=layer,
            num_heads=num_heads,
            page_size=self._spec.page_size,
            k_format=self._spec.k_format,
            v_format=self._spec.v_format,
            sinks=sinks,
            bounded=bounded,
        )

    def _inputs(
        self, queries: mx.array, rotary: mx.array, pages: StoredPages, scale: float
    ) -> dict[str, mx.array]:
        return pages.inputs() | {
            "queries": queries,
            "rotary": rotary,
            "params": device_params(scale, None),
        }

    def _split(
        self, config: LatentConfig, inputs: dict[str, mx.array], items: int, parts: int
    ) -> list[mx.array]:
        heads, dim = config.num_heads, config.layer.head_dim
        outputs = ((parts, heads, dim), mx.float32), ((parts, heads, 4), mx.float32)
        return self._kernel(config, "split")(inputs, _launch(config, items, *outputs))

    def _kernel(self, config: LatentConfig, kind: str) -> Kernel:
        return self._library.made((config, kind), lambda: config.unit(kind))

    def _route(self, step: MetalStep, config: LatentConfig) -> _Route:
        layer = config.layer
        key = (layer.window, layer.keep, config.num_heads, config.rows)
        if key not in step.routes:
            plan = plan_latents(step.metadata, layer, num_heads=config.num_heads, rows=config.rows)
            order = restore_order(plan.rows, plan.others)
            step.routes[key] = _Route(
                plan,
                padded(plan.whole.ravel()),
                padded(plan.split.ravel()),
                padded(plan.joins.ravel()),
                None if order is None else mx.array(order),
            )
        route: _Route = step.routes[key]
        return route


def _launch(config: LatentConfig, items: int, *outputs: tuple[tuple[int, ...], mx.Dtype]) -> Launch:
    threads = 32 * config.simdgroups
    return Launch(grid=(threads * items, 1, 1), threadgroup=(threads, 1, 1), outputs=(*outputs, READ))
