"""How much of each waiting prompt is in the prefix cache, as far as was looked at lately."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.block_manager import BlockManager

from ..types import Sequence

LOOKUPS = 16  # sequences that a step looks up
HASHED_TOKENS = 8192  # of prompts that nobody has named yet, in a step; one prompt is named in any case


class CachedLengths:
    """Estimates: looking up everybody in every step would cost more than it gains.

    A step refreshes some, those never looked at first, then by turns. What has been evicted since shows
    when a sequence is let in, and costs nothing but order.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._known: dict[Sequence, int] = {}  # the one refreshed longest ago comes first

    def of(self, sequence: Sequence) -> int:
        """Cached tokens; 0 where nobody has looked."""
        return self._known.get(sequence, 0)

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence, None)

    def refresh(self, waiting: Iterable[Sequence]) -> None:
        """Look some of these up; those that wait no longer have been forgotten."""
        new = [sequence for sequence in waiting if sequence not in self._known][:LOOKUPS]
        stale = list(self._known)[: LOOKUPS - len(new)]
        may_hash = HASHED_TOKENS
        for sequence in (*new, *stale):
            missing = len(sequence.tokens) - len(sequence.digests) * self._blocks.page_size
            if missing > self._blocks.page_size:
                if may_hash <= 0:
                    continue
                may_hash -= missing
            self._known.pop(sequence, None)
            self._known[sequence] = cached_tokens(sequence, self._blocks)


def cached_tokens(sequence: Sequence, blocks: BlockManager) -> int:
    """Tokens of a waiting sequence that the prefix cache has now."""
    if sequence.skip_prefix_cache or not blocks.prefix_cache:
        return 0
    digests = blocks.name_pages(sequence.tokens, sequence.digests, salt=sequence.salt)
    return blocks.num_findable(digests) * blocks.page_size
