"""How soon pages of each kind are used again, and what keeping one promises: its Gittins index."""

from __future__ import annotations

from collections import abc
from itertools import pairwise
from operator import add, mul

NUM_AGES = 21
YOUNG, GROWTH = 6, 1.5  # releases; the first age ends there, and each end is so many times the one before
AGES = (0, *(round(YOUNG * GROWTH**age) for age in range(NUM_AGES - 1)))  # where each begins
WIDTHS = (*(end - begin for begin, end in pairwise(AGES)), AGES[-1])

NUM_GAPS, NUM_NEW, MAX_USES = 11, 7, 127
GAPS = tuple(1 + min((age // 16).bit_length(), NUM_GAPS - 2) for age in AGES)  # class, by age at a use
USES = tuple(uses if uses <= 6 else 6 + (uses // 6).bit_length() for uses in range(MAX_USES + 1))  # class
ONE_MORE = NUM_GAPS * NUM_NEW  # between the kind of one class of uses and of the next

PRIOR_WEIGHT, PRIOR_HIT_RATE = (
    16.0,
    0.02,
)  # batches, and the part of them used at each age, before any is seen
PARENT_SCALE_WEIGHT, PARENT_AGE_WEIGHT = 4.0, 12.0  # batches' worth of belief in what a kind is part of
MAX_PRIOR_HIT_RATE = 0.9  # at an age, before it is seen
HALF_LIFE = 8192  # releases after which what was learned counts half


def kind_of(*, uses: int, num_new: int, gap: int) -> int:
    """Which pages are alike: those used equally often, in sequences that grew alike and come alike.

    uses      of the page
    num_new   pages of its sequence that were never used; by powers of two
    gap       times between uses of the sequence, as in ``GAPS``; 0: it never came before
    """
    size = min(num_new.bit_length(), NUM_NEW - 1)
    return (USES[min(uses, MAX_USES)] * NUM_NEW + size) * NUM_GAPS + gap


class AgeHistogram:
    """What was seen of the pages of one kind, by age; a batch of pages counts one, however large.

    reached   batches, or parts of them, that got so old without being used again
    used      of these, what was used again at that age
    """

    __slots__ = ("kind", "reached", "used")

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.reached = [0.0] * NUM_AGES
        self.used = [0.0] * NUM_AGES

    def add(self, other: AgeHistogram) -> None:
        self.reached = list(map(add, self.reached, other.reached))
        self.used = list(map(add, self.used, other.used))

    def halve(self) -> None:
        self.reached = [count / 2 for count in self.reached]
        self.used = [count / 2 for count in self.used]


class HitStatistics:
    """Chances that pages are used again at each age, and the Gittins index that follows.

    There are many kinds and few of each are seen. So a kind is taken to be like all pages with as many
    uses and as many new ones behind them, whatever their gap; these to be like all with as many uses,
    and these to be like all pages: up to a factor, and then age by age, the less so the more was seen.
    """

    def __init__(self) -> None:
        self._seen: dict[int, AgeHistogram] = {}
        self._halve_at = HALF_LIFE
        self._indices: dict[int, list[float]] = {}
        self._all: list[float] = []  # chances
        self._by_uses: dict[int, list[float]] = {}
        self._by_size: dict[int, list[float]] = {}
        self.refresh(0)

    def seen(self, kind: int) -> AgeHistogram:
        """Where to count what is seen of a kind."""
        seen = self._seen.get(kind)
        if seen is None:
            seen = self._seen[kind] = AgeHistogram(kind)
        return seen

    def refresh(self, now: int) -> None:
        """Let ``indices`` tell what was seen up to now, in releases."""
        if now >= self._halve_at:
            self._halve_at = now + HALF_LIFE
            for seen in self._seen.values():
                seen.halve()
        by_size = _sums(self._seen.values(), NUM_GAPS)
        by_uses = _sums(by_size.values(), NUM_NEW)
        everything = AgeHistogram(0)
        for part in by_uses.values():
            everything.add(part)
        pairs = zip(everything.used, everything.reached, strict=True)
        self._all = [
            (used + PRIOR_HIT_RATE * PRIOR_WEIGHT) / (reached + PRIOR_WEIGHT) for used, reached in pairs
        ]
        self._by_uses = {uses: _estimate(self._all, seen) for uses, seen in by_uses.items()}
        self._by_size = {
            size: _estimate(self._by_uses[size // NUM_NEW], seen) for size, seen in by_size.items()
        }
        self._indices = {}

    def indices(self, kind: int) -> list[float]:
        """By age, hits per time of keeping a page of this kind, as of ``refresh``.

        One that was used more often is never worth less: it takes much to see that, and little to suspect
        otherwise."""
        indices = self._indices.get(kind)
        if indices is None:
            indices = gittins_index(self._chances(kind))
            if kind >= ONE_MORE:
                indices = list(map(max, indices, self.indices(kind - ONE_MORE)))
            self._indices[kind] = indices
        return indices

    def _chances(self, kind: int) -> list[float]:
        size = kind // NUM_GAPS
        prior = self._by_size.get(size) or self._by_uses.get(size // NUM_NEW) or self._all
        seen = self._seen.get(kind)
        return _estimate(prior, seen) if seen is not None else prior


def _sums(parts: abc.Iterable[AgeHistogram], num_parts: int) -> dict[int, AgeHistogram]:
    """Add up the histograms of kinds that differ only in their last place, which has ``num_parts`` values."""
    sums: dict[int, AgeHistogram] = {}
    for part in parts:
        kind = part.kind // num_parts
        if kind not in sums:
            sums[kind] = AgeHistogram(kind)
        sums[kind].add(part)
    return sums


def _estimate(prior: list[float], seen: AgeHistogram) -> list[float]:
    """Chances by age: a prior, times the factor that fits best, and what was seen."""
    expected = sum(map(mul, seen.reached, prior))
    scale = (sum(seen.used) + PARENT_SCALE_WEIGHT) / (expected + PARENT_SCALE_WEIGHT)
    return [
        (used + PARENT_AGE_WEIGHT * min(scale * chance, MAX_PRIOR_HIT_RATE)) / (reached + PARENT_AGE_WEIGHT)
        for used, reached, chance in zip(seen.used, seen.reached, prior, strict=True)
    ]


def gittins_index(chances: abc.Sequence[float]) -> list[float]:
    """By age, the best hits per time of keeping a page for a while.

    Max over t of P(used within t) / E[time until it is used, at most t].

    Ages are joined from the last to the first as long as going on pays better than what is joined
    so far: O(NUM_AGES).

    chances   that a page is used at each age, if it got there; below 1
    """
    index = [0.0] * NUM_AGES
    joined: list[tuple[float, float, float]] = []  # hits, time and what is left after, per page there
    for age in range(NUM_AGES - 1, -1, -1):
        hits = chances[age]
        time, left = WIDTHS[age] * (1 - hits / 2), 1 - hits
        while joined and joined[-1][0] * time >= hits * joined[-1][1]:
            more, longer, rest = joined.pop()
            hits, time, left = hits + left * more, time + left * longer, left * rest
        joined.append((hits, time, left))
        index[age] = hits / time
    return index
