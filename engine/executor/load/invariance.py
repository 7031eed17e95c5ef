"""Does what a sequence computes depend on the sequences beside it, or on its own later tokens?

Compared bit for bit, which no rounding excuses: a position, a length or a page taken from a neighbour, or a
mask left out, shows in the bits of a model whose rounding errors are so large that a comparison with mlx-lm
says little. What each layer writes to its pages and gets from attention is compared besides the logits, in
which a layer of small weights may leave no trace.

Every backend computes the same shapes twice, with other tokens and other lengths around the observed
sequence. One whose operations give a row the same bits in any batch needs no equal shapes: there the sequence
is computed alone and in one chunk, and compared with what it gave in the probe's steps, among others.
"""

from __future__ import annotations

import numpy as np

from ..paged_model import PagedModel
from .probe_run import ComputedRows, compute_steps
from .probe_steps import Floats

LENGTH = 7  # of the observed sequence; the last token of its last chunk differs, and is not compared
COUNTS = (
    ((2, 4, 3), (1, 1, 1), (1, 2, 3)),  # new tokens of each sequence in each step
    ((5, 1, 3), (1, 1, 1), (2, 1, 3)),
)
LONGEST = 8  # one page: the shapes of what a backend gathers stay the same


def find_dependence(paged: PagedModel, vocab_size: int) -> str | None:
    """On what a sequence's rows depend besides its own tokens up to each, or None. ``paged``: over a
    TracedCache that holds three sequences of LONGEST positions."""
    rng = np.random.default_rng(1)
    observed = rng.integers(0, vocab_size, LENGTH).tolist()
    runs = []
    for index, counts in enumerate(COUNTS):
        neighbours = [rng.integers(0, vocab_size, LONGEST).tolist() for _ in counts[0][1:]]
        sequences = [*neighbours, _with_other_end(observed, vocab_size, index)]
        runs.append(compute_steps(paged, sequences, counts, longest=LONGEST))
    if (found := _difference(*runs)) is not None:
        return f"what a sequence computes changes by {found:.2g} with the tokens beside it or after it"
    return None


def find_dependence_in(
    computed: ComputedRows, paged: PagedModel, tokens: list[int], vocab_size: int
) -> str | None:
    """Find a dependence in the last sequence of computed steps, which had these tokens, if a row's bits
    are the same in any batch and chunk. ``paged`` as above."""
    sequences = [[], [], _with_other_end(tokens, vocab_size, 1)]
    alone = compute_steps(paged, sequences, ((0, 0, len(tokens)),), longest=LONGEST)
    if (found := _difference(computed, alone)) is not None:
        return f"what a sequence computes changes by {found:.2g} when it is alone, in one chunk"
    return None


def _with_other_end(tokens: list[int], vocab_size: int, by: int) -> list[int]:
    return [*tokens[:-1], (tokens[-1] + by) % vocab_size]


def _difference(first: ComputedRows, second: ComputedRows) -> float | None:
    """The largest difference in what the last sequences gave before their last tokens, or None where all bits
    are the same."""
    largest = None
    for a, b in zip(_compared(first), _compared(second), strict=True):
        if not np.array_equal(a.view(np.int32), b.view(np.int32)):
            with np.errstate(invalid="ignore"):
                largest = max(largest or 0.0, float(np.nanmax(np.abs(a - b), initial=0.0)))
    return largest


def _compared(rows: ComputedRows) -> list[Floats]:
    return [part[:-1] for part in (rows.logits[-1], *rows.traced)]
