"""Estimated cached tokens of waiting prompts."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.block_manager import BlockManager

from ..types import Sequence

LOOKUPS = 16  # sequences looked up per step
HASHED_TOKENS = 8192  # tokens of new prompts hashed per step; at least one prompt is hashed


class CachedLengths:
    """Estimates of cached tokens, because looking up all prompts in every step would cost too much.

    Each step refreshes some of them, new ones first, then the others in turn. An eviction since then only
    affects the order; it is noticed at admission.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._known: dict[Sequence, int] = {}  # least recently refreshed first

    def of(self, sequence: Sequence) -> int:
        """Return the estimated cached tokens of a sequence; 0 if it was not looked up yet."""
        return self._known.get(sequence, 0)

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence, None)

    def refresh(self, waiting: Iterable[Sequence]) -> None:
        """Look up some of these sequences; drop those that no longer wait."""
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
    """Return how many tokens of a waiting sequence the prefix cache has now."""
    if sequence.skip_prefix_cache or not blocks.prefix_cache:
        return 0
    digests = blocks.name_pages(sequence.tokens, sequence.digests, salt=sequence.salt, media=sequence.media)
    return blocks.num_findable(digests) * blocks.page_size
