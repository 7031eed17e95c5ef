"""The order of queues that prefer cached prefixes."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.block_manager import BlockManager

from ..types import Sequence
from .age_order import AgeOrder
from .cached_lengths import CachedLengths


class PrefixOrder(AgeOrder):
    """``AgeOrder``, and among those of one place whoever has most in the prefix cache first.

    lengths   estimates of what is cached
    """

    def __init__(self, blocks: BlockManager) -> None:
        super().__init__()
        self.lengths = CachedLengths(blocks)

    def leaves(self, sequence: Sequence, equals: Iterable[Sequence]) -> None:
        super().leaves(sequence, equals)
        self.lengths.forget(sequence)

    def replace(self, sequence: Sequence, successor: Sequence) -> None:
        super().replace(sequence, successor)
        self.lengths.forget(sequence)

    def _preference(self, sequence: Sequence) -> int:
        return -self.lengths.of(sequence)
