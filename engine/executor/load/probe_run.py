"""Steps of the parity probe, and a check that sequences do not depend on each other."""

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
    logits: list[Floats]
    traced: list[Floats]


class TracedCache:
    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self.rows: list[mx.array] = []

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
        first = len(tokens) - counts[-1]
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


def find_dependence(
    computed: ComputedRows,
    paged: PagedModel,
    sequences: list[list[int]],
    steps: Sequence[tuple[int, ...]],
    vocab_size: int,
    *,
    alone: bool,
) -> str | None:
    """Compute the last sequence again, with another last token, and compare its other rows.

    It is computed ``alone`` and in one chunk, or in the same chunks next to other sequences of equal counts.
    """
    *others, observed = sequences
    rest: list[list[int]] = [[] for _ in others]
    if alone:
        counts = [(*(0 for _ in others), len(observed))]
        how = "it is computed alone and in one chunk"
    else:
        rng = np.random.default_rng(1)
        size = len(others)
        counts = [(*((sum(each[:-1]) + i) // size for i in range(size)), each[-1]) for each in steps]
        lengths = [sum(column) for column in zip(*counts, strict=True)]
        rest = [rng.integers(0, vocab_size, length).tolist() for length in lengths[:-1]]
        how = "the batch has other sequences or later tokens"
    again = [*rest, [*observed[:-1], (observed[-1] + 1) % vocab_size]]
    longest = max(map(len, sequences))
    found = _difference(computed, compute_steps(paged, again, counts, longest=longest))
    return None if found is None else f"a sequence's results change by {found:.2g} if {how}"


def _difference(first: ComputedRows, second: ComputedRows) -> float | None:
    largest = None
    for a, b in zip(_compared(first), _compared(second), strict=True):
        if not np.array_equal(a.view(np.int32), b.view(np.int32)):
            with np.errstate(invalid="ignore"):
                largest = max(largest or 0.0, float(np.nanmax(np.abs(a - b), initial=0.0)))
    return largest


def _compared(rows: ComputedRows) -> list[Floats]:
    return [part[:-1] for part in (rows.logits[-1], *rows.traced)]
