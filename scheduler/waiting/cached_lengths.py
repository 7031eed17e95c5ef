from __future__ import annotations

from collections.abc import Iterable

from octavo.block_manager import BlockManager

from ..types import Sequence

LOOKUPS = 16  # sequences per step whose cached tokens are looked up
HASHED_TOKENS = 8192  # tokens of new prompts hashed per step; one prompt is always hashed


class CachedLengths:
    """Estimates of how many tokens of each waiting prompt are cached.

    Each step looks up only some prompts: new prompts first, then the others in turn.
    """

    def __init__(self, blocks: BlockManager | None) -> None:
        self._blocks = blocks
        self._known: dict[Sequence, int] = {}

    def of(self, sequence: Sequence) -> int:
        """Return the estimated cached tokens of a sequence; 0 if it was not looked up yet."""
        return self._known.get(sequence, 0)

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence, None)

    def refresh(self, waiting: Iterable[Sequence]) -> None:
        """Look up some of these sequences; drop those that no longer wait."""
        if (blocks := self._blocks) is None:
            return
        new = [sequence for sequence in waiting if sequence not in self._known][:LOOKUPS]
        stale = list(self._known)[: LOOKUPS - len(new)]
        may_hash = HASHED_TOKENS
        for sequence in (*new, *stale):
            missing = len(sequence.tokens) - len(sequence.digests) * blocks.page_size
            if missing > blocks.page_size:
                if may_hash <= 0:
                    continue
                may_hash -= missing
            self._known.pop(sequence, None)
            self._known[sequence] = cached_tokens(sequence, blocks)


def cached_tokens(sequence: Sequence, blocks: BlockManager) -> int:
    """Return how many tokens of a waiting sequence are in the prefix cache now."""
    if sequence.skip_prefix_cache or not blocks.prefix_cache:
        return 0
    digests = blocks.page_digests(sequence.tokens, sequence.digests, salt=sequence.salt, media=sequence.media)
    return blocks.num_findable(digests) * blocks.page_size
