"""Computation of the probe's steps, with a trace of its caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from octavo.kernels.interface import AttendOptions, PagedKVCache
from octavo.kernels.metadata import AttentionMetadata

from ..batch import NO_ROWS, Batch
from ..paged_model import PagedModel
from .probe_reference import evaluated
from .probe_steps import Floats, Work, step_metadata


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """Results of steps, in the order of each sequence's tokens.

    logits  [L, V] of each sequence that has tokens
    traced  [L, ...] arrays of the last sequence: the data passed through every layer's cache
    """

    logits: list[Floats]
    traced: list[Floats]


class TracedCache:
    """A ``PagedKVCache`` that keeps the arrays passed through it in the current step."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self.rows: list[mx.array] = []  # arrays [T, ...]

    def begin_step(self, metadata: AttentionMetadata) -> None:
        self.rows = []
        self._cache.begin_step(metadata)

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        self.rows += [keys, values]
        self._cache.write(layer, keys, values)

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        self.rows += [queries, out := self._cache.attend(layer, queries, options)]
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def compute_steps(
    paged: PagedModel, sequences: list[list[int]], steps: Sequence[tuple[int, ...]], *, longest: int
) -> ComputedRows:
    """Compute sequences from their beginning; ``steps`` has each step's number of new tokens per sequence.
    ``paged`` has a TracedCache for that many sequences of ``longest`` positions."""
    cache = paged.kv_cache
    assert isinstance(cache, TracedCache)
    written = [0] * len(sequences)
    logits: list[list[Floats]] = [[] for _ in sequences]
    traced: list[list[Floats]] = []
    for counts in steps:
        work: list[Work] = [(i, written[i], written[i] + count) for i, count in enumerate(counts) if count]
        tokens = np.concatenate([sequences[i][start:stop] for i, start, stop in work]).astype(np.int32)
        metadata = step_metadata(work, num_sequences=len(sequences), longest=longest)
        out = paged.forward(Batch(tokens, NO_ROWS, metadata)).arrays[0]
        first = len(tokens) - counts[-1]  # first row of the last sequence
        rows = [rows[first:].astype(mx.float32) for rows in cache.rows if counts[-1]]
        paged.evaluate([out, *rows])
        for (i, _, stop), part in zip(
            work, np.split(evaluated(out), metadata.q_start[1:-1].tolist()), strict=True
        ):
            logits[i].append(part)
            written[i] = stop
        if counts[-1]:
            traced.append([np.array(part) for part in rows])
    return ComputedRows(
        [np.concatenate(parts) for parts in logits if parts],
        [np.concatenate(parts) for parts in zip(*traced, strict=True)],
    )
