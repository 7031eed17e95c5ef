"""What was generated lately for one tenant: where suffix decoding also looks.

Bounded: each tenant has RECENT_TOKENS tokens at most, in 24 bytes each with their index, and of so many
tenants, the latest ones, something is kept.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from .ngram_index import NGRAM, NgramIndex

RECENT_TOKENS = 32_768
MAX_TENANTS = 32
BETWEEN = -1  # stands between two outputs


class RecentOutputs:
    """One tenant's, behind each other, the latest last; BETWEEN stands in between.

    ``generation`` says when positions have changed: old outputs have been dropped.
    """

    def __init__(self, capacity: int = RECENT_TOKENS) -> None:
        self.tokens = array("i")
        self.index = NgramIndex()
        self.generation = 0
        self._capacity = capacity

    @property
    def num_bytes(self) -> int:
        return self.tokens.itemsize * len(self.tokens) + self.index.num_bytes

    def add(self, output: Sequence[int]) -> None:
        """Remember an output; of one that is too long its end, of all together half when there is no more
        room."""
        latest = array("i", output[-(self._capacity // 2) + 1 :])
        if len(latest) <= NGRAM:
            return
        if len(self.tokens) + len(latest) >= self._capacity:
            self.tokens = self.tokens[max(0, len(self.tokens) - self._capacity // 2 + len(latest)) :]
            self.index = NgramIndex()
            self.generation += 1
        self.tokens.append(BETWEEN)
        self.tokens.extend(latest)

    def places(self, ngram: Sequence[int], most: int) -> list[int]:
        """Ends of an n-gram, latest first and ``most`` at most, or of others with its hash. What was added
        is indexed when somebody asks."""
        self.index.extend(self.tokens)
        return self.index.places_of(ngram, most)


class Histories:
    """Of several tenants; whoever has not asked for the longest time is forgotten."""

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._of: OrderedDict[Hashable, RecentOutputs] = OrderedDict()
        self._max_tenants = max_tenants

    def of(self, owner: Hashable) -> RecentOutputs:
        """Whoever may see one of an owner's outputs may see all of them."""
        found = self._of.setdefault(owner, RecentOutputs())
        self._of.move_to_end(owner)
        while len(self._of) > self._max_tenants:
            self._of.popitem(last=False)
        return found
