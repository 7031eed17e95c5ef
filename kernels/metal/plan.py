"""Plan of a step on Metal: which kernel computes which rows, as flat int32 arrays.

The decode kernel computes sequences with one row. The chunk kernel computes other rows in tiles. A decode row
with many keys is split among threadgroups. Every choice depends only on the row's own sequence, so a sequence
gets the same bits in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..metadata import AttentionMetadata, Ints
from ..visibility import window_start
from .attention_units import DECODE_TILE

SPLIT_TILES = 4
"""Size of the smallest split, in tiles of 32 keys: 128 positions."""

FULL_SPLIT_TILES = 8
"""Size of a split that keeps every simdgroup of a threadgroup busy, in tiles. If a row has more than
MANY_SPLITS splits, they are at least of this size."""

MANY_SPLITS = 32
MAX_SPLITS = 128
"""Largest number of splits of a row; longer sequences get larger splits."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The decode rows of a step, in layers with the same window.

    items   [M, 4]  (row, sequence, first tile, end tile) of each split; the splits of a row are adjacent
    joins   [R, 4]  (index of the first item, number of items, 0, 0) of each row; empty if no row is split
    """

    items: Ints
    joins: Ints


def num_tiles(positions: Ints, window: int | None, keep: int) -> Ints:
    """Return how many tiles of 32 keys queries at ``positions`` read."""
    if window is None:
        return np.asarray(positions // DECODE_TILE + 1, np.int32)
    return bounded_tiles(positions, window_start(positions, window), keep)


def bounded_tiles(positions: Ints, low: Ints, keep: int) -> Ints:
    end = positions // DECODE_TILE + 1
    first = low // DECODE_TILE
    return np.asarray(end - first + np.minimum(-(-np.minimum(keep, low) // DECODE_TILE), first), np.int32)


def num_splits(tiles: Ints) -> Ints:
    fine, full = -(-tiles // SPLIT_TILES), -(-tiles // FULL_SPLIT_TILES)
    return np.asarray(np.minimum(np.minimum(fine, np.maximum(full, MANY_SPLITS)), MAX_SPLITS), np.int32)


def plan_decode(metadata: AttentionMetadata, window: int | None, keep: int) -> DecodePlan:
    """Plan the decode rows of a step.

    If any row is split, the other rows are launched as one split each.
    """
    sequences = np.flatnonzero(np.diff(metadata.q_start) == 1).astype(np.int32)
    rows = metadata.q_start[sequences]
    tiles = num_tiles(metadata.positions[rows], window, keep)
    items, first = divide(rows, sequences, tiles, num_splits(tiles))
    return DecodePlan(items, joins_of(first if len(items) > len(rows) else first[:0], len(items)))


def joins_of(first: Ints, num_items: int) -> Ints:
    joins = np.zeros((len(first), 4), np.int32)
    joins[:, 0], joins[:, 1] = first, np.diff(np.append(first, num_items))
    return joins


def divide(rows: Ints, sequences: Ints, tiles: Ints, splits: Ints) -> tuple[Ints, Ints]:
    first = np.cumsum(splits) - splits
    owner = np.repeat(np.arange(len(rows)), splits)
    part, end, count = np.arange(len(owner)) - first[owner], tiles[owner].astype(np.int64), splits[owner]
    items = np.stack([rows[owner], sequences[owner], end * part // count, end * (part + 1) // count], axis=1)
    return items.astype(np.int32), first.astype(np.int32)


def plan_chunks(metadata: AttentionMetadata, tokens_per_tile: int) -> Ints:
    """Return the tiles [N, 4] of the step's chunk rows.

    A tile is (first row, number of rows, sequence, total number of tiles). Entries (index, 0, 0, row) follow:
    decode output ``index`` is copied to ``row``.
    """
    rows = chunk_rows(metadata)
    if not len(rows):
        return np.zeros((0, 4), np.int32)
    sequences = metadata.row_sequences[rows]
    first, count = cut(rows, sequences, tokens_per_tile)
    tiles = np.stack([rows[first], count, sequences[first], np.full_like(first, len(first))], axis=1)
    decoded = np.setdiff1d(np.arange(metadata.num_tokens), rows)
    nothing = np.zeros_like(decoded)
    moved = np.stack([np.arange(len(decoded)), nothing, nothing, decoded], axis=1)
    return np.concatenate([tiles, moved]).astype(np.int32)


def chunk_rows(metadata: AttentionMetadata) -> Ints:
    counts = np.diff(metadata.q_start)
    return np.flatnonzero(np.repeat(counts > 1, counts)).astype(np.int32)


def cut(rows: Ints, owners: NDArray[np.integer], size: int) -> tuple[Ints, Ints]:
    """Cut ``rows`` into runs of at most ``size`` consecutive rows with one owner.

    Returns the first index and the length of each run.
    """
    starts = np.append(True, (np.diff(rows) != 1) | (np.diff(owners) != 0))[: len(rows)]
    begin = np.flatnonzero(starts)
    within = np.arange(len(rows)) - np.repeat(begin, np.diff(np.append(begin, len(rows))))
    first = np.flatnonzero(within % size == 0).astype(np.int32)
    return first, np.diff(np.append(first, len(rows))).astype(np.int32)


def restore_order(*rows: Ints) -> Ints | None:
    joined = np.concatenate(rows)
    order = np.argsort(joined).astype(np.int32)
    return None if (order == np.arange(len(order))).all() else order
