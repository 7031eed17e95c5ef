"""Whose drafts a step computes: as many in all as make the most tokens of its time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

LEAST_GAIN = 1.08
"""Times as many tokens per second, as expected, that are worth a draft. Less is within the error of
what is known of how often drafts hold and of what they cost."""


def allot(
    wishes: Sequence[Sequence[float]],
    plain: int,
    ratios: Sequence[tuple[int, float]],
    *,
    least: float = LEAST_GAIN,
) -> list[int]:
    """For each wish, how many of its drafts to compute; none of anybody's where that gains hardly anything.

    wishes   of each of its drafts, how likely it holds if the one before it does
    plain    sequences that get a token from the step in any case
    ratios   numbers of drafts, rising, and how many times as long a step with so many takes
    least    gain that is worth drafts

    The drafts that are most likely to be reached and to hold come first, whosever they are. One more is of
    use if what it adds to the step's tokens is more than its share of the time: that depends on all others.
    """
    # Of each sequence its next draft, the likeliest on top; a draft is less likely than the one before it.
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
    """How likely the likeliest draft must hold, at least, for ``allot`` to choose any: a number of drafts
    adds at most so many tokens, each as likely as the first."""
    return min((plain * (LEAST_GAIN * ratio - 1) / number for number, ratio in ratios), default=1.0)
