"""Statistics of cache hits by age, and the Gittins index computed from them.

Time is counted in page releases. An age is a range of the time since a release.
"""

from __future__ import annotations

from collections import abc
from itertools import pairwise
from operator import add, mul

NUM_AGES = 21
YOUNG, GROWTH = 6, 1.5  # the first age ends after 6 releases; each later age is 1.5 times as long
AGES = (0, *(round(YOUNG * GROWTH**age) for age in range(NUM_AGES - 1)))
WIDTHS = (*(end - begin for begin, end in pairwise(AGES)), AGES[-1])

NUM_GAPS, NUM_NEW, MAX_USES = 11, 7, 127
USES = tuple(uses if uses <= 6 else 6 + (uses // 6).bit_length() for uses in range(MAX_USES + 1))
ONE_MORE = NUM_GAPS * NUM_NEW

PRIOR_WEIGHT, PRIOR_HIT_RATE = 16.0, 0.02
PARENT_SCALE_WEIGHT, PARENT_AGE_WEIGHT = 4.0, 12.0
MAX_PRIOR_HIT_RATE = 0.9
HALF_LIFE = 8192  # releases after which an observation counts half


def kind_of(*, uses: int, num_new: int, gap: int) -> int:
    size = min(num_new.bit_length(), NUM_NEW - 1)
    return (USES[min(uses, MAX_USES)] * NUM_NEW + size) * NUM_GAPS + gap


class AgeHistogram:
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
    def __init__(self) -> None:
        self._seen: dict[int, AgeHistogram] = {}
        self._halve_at = HALF_LIFE
        self._indices: dict[int, list[float]] = {}
        self._all: list[float] = []
        self._by_uses: dict[int, list[float]] = {}
        self._by_size: dict[int, list[float]] = {}
        self.refresh(0)

    def seen(self, kind: int) -> AgeHistogram:
        seen = self._seen.get(kind)
        if seen is None:
            seen = self._seen[kind] = AgeHistogram(kind)
        return seen

    def refresh(self, now: int) -> None:
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
        """Return, by age, the Gittins index of a page of this kind."""
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
    sums: dict[int, AgeHistogram] = {}
    for part in parts:
        kind = part.kind // num_parts
        if kind not in sums:
            sums[kind] = AgeHistogram(kind)
        sums[kind].add(part)
    return sums


def _estimate(prior: list[float], seen: AgeHistogram) -> list[float]:
    expected = sum(map(mul, seen.reached, prior))
    scale = (sum(seen.used) + PARENT_SCALE_WEIGHT) / (expected + PARENT_SCALE_WEIGHT)
    return [
        (used + PARENT_AGE_WEIGHT * min(scale * chance, MAX_PRIOR_HIT_RATE)) / (reached + PARENT_AGE_WEIGHT)
        for used, reached, chance in zip(seen.used, seen.reached, prior, strict=True)
    ]


def gittins_index(chances: abc.Sequence[float]) -> list[float]:
    """Return, by age, the Gittins index: max over t of P(hit within t) / E[min(time of the hit, t)]."""
    index = [0.0] * NUM_AGES
    joined: list[tuple[float, float, float]] = []
    for age in range(NUM_AGES - 1, -1, -1):
        hits = chances[age]
        time, left = WIDTHS[age] * (1 - hits / 2), 1 - hits
        while joined and joined[-1][0] * time >= hits * joined[-1][1]:
            more, longer, rest = joined.pop()
            hits, time, left = hits + left * more, time + left * longer, left * rest
        joined.append((hits, time, left))
        index[age] = hits / time
    return index
