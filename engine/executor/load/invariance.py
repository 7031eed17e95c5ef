"""Check that a sequence's results do not depend on other sequences or on its own later tokens.

Results are compared bit for bit. So a position, length or page of a neighbour, or a missing mask, is found
even if rounding errors would hide it from a comparison with mlx-lm. Besides the logits, each layer's pages
and attention outputs are compared, because small weights may leave no trace in the logits.

Every backend computes the same shapes twice, with other tokens and lengths around the observed sequence. If a
backend's rows have the same bits in any batch, the sequence is also computed alone and in one chunk, and
compared with the probe's steps.
"""

from __future__ import annotations

import numpy as np

from ..paged_model import PagedModel
from .probe_run import ComputedRows, compute_steps
from .probe_steps import Floats

LENGTH = 7  # tokens of the observed sequence; the last token of its last chunk varies and is not compared
COUNTS = (
    ((2, 4, 3), (1, 1, 1), (1, 2, 3)),  # new tokens of each sequence in each step
    ((5, 1, 3), (1, 1, 1), (2, 1, 3)),
)
LONGEST = 8  # positions: one page, so that gathered arrays keep their shapes


def find_dependence(paged: PagedModel, vocab_size: int) -> str | None:
    """Return the dependence of a sequence's rows on other tokens than their own past, or None. ``paged`` has
    a TracedCache for three sequences of LONGEST positions."""
    rng = np.random.default_rng(1)
    observed = rng.integers(0, vocab_size, LENGTH).tolist()
    runs = []
    for index, counts in enumerate(COUNTS):
        neighbours = [rng.integers(0, vocab_size, LONGEST).tolist() for _ in counts[0][1:]]
        sequences = [*neighbours, _with_other_end(observed, vocab_size, index)]
        runs.append(compute_steps(paged, sequences, counts, longest=LONGEST))
    if (found := _difference(*runs)) is not None:
        return f"a sequence's results change by {found:.2g} with other sequences in the batch or later tokens"
    return None


def find_dependence_in(
    computed: ComputedRows, paged: PagedModel, tokens: list[int], vocab_size: int
) -> str | None:
    """Compare the last computed sequence with the same sequence alone and in one chunk; return a difference.
    ``tokens``: the last sequence's. ``paged`` as in ``find_dependence``. Valid if a row's bits do not depend
    on batch and chunk."""
    sequences = [[], [], _with_other_end(tokens, vocab_size, 1)]
    alone = compute_steps(paged, sequences, ((0, 0, len(tokens)),), longest=LONGEST)
    if (found := _difference(computed, alone)) is not None:
        return f"a sequence's results change by {found:.2g} when it is computed alone and in one chunk"
    return None


def _with_other_end(tokens: list[int], vocab_size: int, by: int) -> list[int]:
    return [*tokens[:-1], (tokens[-1] + by) % vocab_size]


def _difference(first: ComputedRows, second: ComputedRows) -> float | None:
    """Return the largest difference of the last sequences' results before their last tokens, or None if
    equal.
    """
    largest = None
    for a, b in zip(_compared(first), _compared(second), strict=True):
        if not np.array_equal(a.view(np.int32), b.view(np.int32)):
            with np.errstate(invalid="ignore"):
                largest = max(largest or 0.0, float(np.nanmax(np.abs(a - b), initial=0.0)))
    return largest


def _compared(rows: ComputedRows) -> list[Floats]:
    return [part[:-1] for part in (rows.logits[-1], *rows.traced)]
