"""What the rows of a step launch, decided on the host once per step: flat int32 arrays.

Rows of sequences with one row go to the decode kernel, all others, tile by tile, to the chunk
kernel. Long rows are split over their keys. Every choice depends on the row's own sequence
alone, never on its neighbours, so that a sequence gets the same bits in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..metadata import AttentionMetadata, Ints
from .attention_units import DECODE_TILE

SPLIT_TILES = 16
"""Tiles of 32 keys that one threadgroup may take alone (512 positions)."""

MAX_SPLITS = 32
"""Above, splits grow instead: the reduce kernel reads them one after the other."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Decode rows under one window.

    whole        [N, 4]  (row, sequence, first tile, end tile) of rows that are not split
    parts        [M, 4]  the same for every split, those of a row adjacent
    joins        [R, 4]  (first of its parts, number of parts, 0, 0) of each split row
    rows         [N + R] the step's rows in the order of the outputs
    """

    whole: Ints
    parts: Ints
    joins: Ints
    rows: Ints


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Tiles [N, 4] of chunk rows: (first row, tokens, sequence, row of the output); ``rows`` are
    the step's rows in the order of the output."""

    tiles: Ints
    rows: Ints


def num_tiles(positions: Ints, window: int | None, keep: int) -> Ints:
    """Tiles of 32 keys that queries at ``positions`` read: ``span_from`` of the sources."""
    end = positions // DECODE_TILE + 1
    if window is None:
        return end
    low = np.maximum(0, positions - window + 1)
    first = low // DECODE_TILE
    return np.asarray(end - first + np.minimum(-(-np.minimum(keep, low) // DECODE_TILE), first), np.int32)


def num_splits(tiles: Ints) -> Ints:
    return np.minimum(-(-tiles // SPLIT_TILES), MAX_SPLITS)


def plan_decode(metadata: AttentionMetadata, window: int | None, keep: int) -> DecodePlan:
    sequences = np.flatnonzero(np.diff(metadata.q_start) == 1).astype(np.int32)
    rows = metadata.q_start[sequences]
    tiles = num_tiles(metadata.positions[rows], window, keep)
    splits = num_splits(tiles)
    single = splits == 1
    whole = np.stack([rows, sequences, np.zeros_like(rows), tiles], axis=1)[single]
    parts: list[tuple[int, int, int, int]] = []
    joins: list[tuple[int, int, int, int]] = []
    for at in np.flatnonzero(~single).tolist():
        count, end = int(splits[at]), int(tiles[at])
        joins.append((len(parts), count, 0, 0))
        edges = pairwise(end * s // count for s in range(count + 1))
        parts += [(int(rows[at]), int(sequences[at]), first, last) for first, last in edges]
    return DecodePlan(whole, _fours(parts), _fours(joins), np.concatenate([rows[single], rows[~single]]))


def plan_chunks(metadata: AttentionMetadata, tokens_per_tile: int) -> ChunkPlan:
    tiles: list[tuple[int, int, int, int]] = []
    rows: list[int] = []
    for sequence in np.flatnonzero(np.diff(metadata.q_start) > 1).tolist():
        begin, end = int(metadata.q_start[sequence]), int(metadata.q_start[sequence + 1])
        for first in range(begin, end, tokens_per_tile):
            tiles.append((first, min(tokens_per_tile, end - first), sequence, len(rows) + first - begin))
        rows += range(begin, end)
    return ChunkPlan(_fours(tiles), _ints(rows))


def restore_order(*rows: Ints) -> Ints | None:
    """Where each row of the step lies in the outputs put one after the other; None: in place."""
    joined = np.concatenate(rows)
    order = np.argsort(joined).astype(np.int32)
    return None if (order == np.arange(len(order))).all() else order


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int32)


def _fours(values: list[tuple[int, int, int, int]]) -> Ints:
    return np.array(values, np.int32).reshape(-1, 4)
