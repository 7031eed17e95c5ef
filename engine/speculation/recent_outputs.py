"""Recent outputs of a tenant, which suffix decoding also searches."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from .ngram_index import NGRAM, NgramIndex

RECENT_TOKENS = 32_768
MAX_TENANTS = 32
BETWEEN = -1  # separator between two outputs


class RecentOutputs:
    def __init__(self, capacity: int = RECENT_TOKENS) -> None:
        self.tokens = array("i")
        self.index = NgramIndex()
        self.generation = 0
        self._capacity = capacity

    @property
    def num_bytes(self) -> int:
        return self.tokens.itemsize * len(self.tokens) + self.index.num_bytes

    def add(self, output: Sequence[int]) -> None:
        latest = array("i", output[-(self._capacity // 2) + 1 :])
        if len(latest) <= NGRAM:
            return
        if len(self.tokens) + len(latest) >= self._capacity:
            self.tokens = self.tokens[max(0, len(self.tokens) - self._capacity // 2 + len(latest)) :]
            self.index = NgramIndex()
            self.generation += 1
        self.tokens.append(BETWEEN)
        self.tokens.extend(latest)

    def places(self, ngram: Sequence[int], limit: int) -> list[int]:
        """Return candidate positions of an n-gram, latest first."""
        self.index.extend(self.tokens)
        return self.index.places_of(ngram, limit)


class Histories:
    """Recent outputs of several tenants; the least recently used tenant is dropped."""

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._of: OrderedDict[Hashable, RecentOutputs] = OrderedDict()
        self._max_tenants = max_tenants

    def of(self, owner: Hashable) -> RecentOutputs:
        found = self._of.setdefault(owner, RecentOutputs())
        self._of.move_to_end(owner)
        while len(self._of) > self._max_tenants:
            self._of.popitem(last=False)
        return found
