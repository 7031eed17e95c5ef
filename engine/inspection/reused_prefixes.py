from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, replace

from octavo.block_manager import Digest
from octavo.scheduler import Sequence

MOST_PREFIXES = 256
PREVIEW_TOKENS = 24


@dataclass(frozen=True, slots=True)
class ReusedPrefix:
    """The cached beginning of prompts, where look-ups ended.

    preview   its first tokens
    """

    salt: bytes
    num_tokens: int
    preview: tuple[int, ...]
    num_hits: int = 0

    @property
    def tokens_saved(self) -> int:
        return self.num_hits * self.num_tokens


class ReusedPrefixes:
    """The latest reused prefixes."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._latest: OrderedDict[Digest, ReusedPrefix] = OrderedDict()

    def add(self, sequence: Sequence, num_hit: int) -> None:
        assert sequence.table is not None
        last = sequence.table.digests[num_hit // self._page_size - 1]
        preview = tuple(sequence.tokens[: min(num_hit, PREVIEW_TOKENS)])
        known = self._latest.pop(last, None) or ReusedPrefix(sequence.salt, num_hit, preview)
        self._latest[last] = replace(known, num_hits=known.num_hits + 1)
        if len(self._latest) > MOST_PREFIXES:
            self._latest.popitem(last=False)

    def best(self, salt_prefix: bytes, most: int) -> list[ReusedPrefix]:
        """Return the prefixes that saved the most tokens, of salts that begin with ``salt_prefix``."""
        own = [prefix for prefix in self._latest.values() if prefix.salt.startswith(salt_prefix)]
        return heapq.nlargest(most, own, key=lambda prefix: prefix.tokens_saved)
