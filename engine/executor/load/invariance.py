"""Does what a sequence computes depend on the sequences beside it, or on its own later tokens?

Compared bit for bit, which no rounding excuses: a position, a length or a page taken from a neighbour, or a
mask left out, shows in the bits of a model whose rounding errors are so large that a comparison with mlx-lm
says little. What each layer writes to its pages and gets from attention is compared besides the logits, in
which a layer of small weights may leave no trace.

Every backend computes the same shapes twice, with other tokens and other lengths around the observed
sequence. One whose operations give a row the same bits in any batch also computes that sequence alone and in
one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from octavo.kernels.interface import AttendOptions, PagedKVCache
from octavo.kernels.metadata import AttentionMetadata

from ..paged_model import PagedModel
from .probe_reference import evaluated
from .probe_steps import Floats, Work, step_metadata

OBSERVED = 2
LENGTH = 7  # of the observed sequence; the last token of its last chunk differs, and is not compared
COUNTS = (
    ((2, 4, 3), (1, 1, 1), (1, 2, 3)),  # new tokens of each sequence in each step
    ((5, 1, 3), (1, 1, 1), (2, 1, 3)),
)
LONGEST = 8  # one page: the shapes of what a backend gathers stay the same
NUM_SEQUENCES = 3


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Sequences, and how they are cut into steps.

    tokens  of each sequence
    counts  of new ones in each step
    """

    tokens: list[list[int]]
    counts: tuple[tuple[int, int, int], ...]


class TracedCache:
    """A ``PagedKVCache`` that keeps what went through it in the step that has begun."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self.rows: list[mx.array] = []  # [T, ...] each

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


def find_dependence(paged: PagedModel, vocab_size: int, *, any_batch: bool) -> str | None:
    """On what a sequence's rows depend besides its own tokens up to each, or None. ``paged``: over a
    TracedCache that holds NUM_SEQUENCES sequences of LONGEST positions. ``any_batch``: the backend's
    operations promise equal bits in any batch and chunk."""
    rng = np.random.default_rng(1)
    runs = []
    observed = rng.integers(0, vocab_size, LENGTH).tolist()
    for index, counts in enumerate(COUNTS):
        tokens = [rng.integers(0, vocab_size, LONGEST).tolist() for _ in range(NUM_SEQUENCES - 1)]
        last = (observed[-1] + index) % vocab_size
        runs.append(Surroundings([*tokens, [*observed[:-1], last]], counts))
    first, second = (_observe(paged, run) for run in runs)
    if (found := _difference([x[:-1] for x in first], [x[:-1] for x in second])) is not None:
        return f"what a sequence computes changes by {found:.2g} with the tokens beside it or after it"
    if any_batch:
        alone = _observe(paged, Surroundings([[], [], observed], ((0, 0, LENGTH),)))
        if (found := _difference(first, alone)) is not None:
            return f"what a sequence computes changes by {found:.2g} when it is alone, in one chunk"
    return None


def _observe(paged: PagedModel, run: Surroundings) -> list[Floats]:
    """Rows [LENGTH, ...] of the observed sequence: its logits, and what went through every layer's cache."""
    cache = paged.kv_cache
    assert isinstance(cache, TracedCache)
    written = [0] * NUM_SEQUENCES
    steps: list[list[Floats]] = []
    for counts in run.counts:
        work: list[Work] = [(i, written[i], written[i] + count) for i, count in enumerate(counts) if count]
        tokens = np.concatenate([run.tokens[i][start:stop] for i, start, stop in work]).astype(np.int32)
        metadata = step_metadata(work, num_sequences=NUM_SEQUENCES, longest=LONGEST)
        cache.begin_step(metadata)
        logits = paged.forward(tokens, metadata)
        traced = [rows[-counts[OBSERVED] :].astype(mx.float32) for rows in cache.rows]
        paged.evaluate([logits, *traced])
        steps.append([evaluated(logits)[-counts[OBSERVED] :], *map(np.array, traced)])
        for i, _, stop in work:
            written[i] = stop
    return [np.concatenate(parts) for parts in zip(*steps, strict=True)]


def _difference(first: list[Floats], second: list[Floats]) -> float | None:
    """The largest difference, or None where all bits are the same."""
    largest = None
    for a, b in zip(first, second, strict=True):
        if not np.array_equal(a.view(np.int32), b.view(np.int32)):
            with np.errstate(invalid="ignore"):
                largest = max(largest or 0.0, float(np.nanmax(np.abs(a - b), initial=0.0)))
    return largest
