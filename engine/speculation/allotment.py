"""Allotment of a step's drafts to sequences, for the most tokens per second."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

LEAST_GAIN = 1.08
"""Smallest expected ratio of tokens per second, with to without drafts, for which drafts are computed. A
smaller gain is within the error of the estimated acceptance rates and costs."""


def allot(
    wishes: Sequence[Sequence[float]],
    plain: int,
    ratios: Sequence[tuple[int, float]],
    *,
    least: float = LEAST_GAIN,
) -> list[int]:
    """Return how many drafts of each wish to compute; none at all if the gain is negligible.

    wishes   for each draft, the probability that it is accepted if the one before it is
    plain    number of sequences that get a token from the step in any case
    ratios   ascending numbers of drafts, each with the step's relative time
    least    smallest gain that is worth drafts

    The drafts most likely to be accepted come first, whatever their sequence. One more draft is useful if it
    adds more to the step's tokens than to its time, which depends on all others.
    """
    # The next draft of each sequence, the likeliest on top; later drafts of a sequence are less likely.
    heap = [(-holds[0], index, 1) for index, holds in enumerate(wishes) if holds and holds[0] > 0]
    heapq.heapify(heap)
    order: list[int] = []
    tokens = float(plain)
    best, count = least * plain, 0
    for number, ratio in ratios:
        while heap and len(order) < number:
            likely, index, rank = heap[0]
            tokens -= likely
            order.append(index)
            holds = wishes[index]
            if rank < len(holds):
                heapq.heapreplace(heap, (likely * holds[rank], index, rank + 1))
            else:
                heapq.heappop(heap)
        if len(order) < number:
            break
        if tokens / ratio > best:
            best, count = tokens / ratio, number
    counts = [0] * len(wishes)
    for index in order[:count]:
        counts[index] += 1
    return counts


def least_hold(plain: int, ratios: Sequence[tuple[int, float]]) -> float:
    """Return the smallest probability of the likeliest draft at which ``allot`` would choose any. It assumes
    that all drafts are as likely as the first."""
    return min((plain * (LEAST_GAIN * ratio - 1) / number for number, ratio in ratios), default=1.0)
