"""Longest cached prefix first, within a bound on how often the oldest is overtaken."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from octavo.block_manager import BlockManager

from ..types import Sequence
from .first_come import LOOK_AHEAD, FirstComeQueue
from .prefix_order import PrefixOrder


class LongestPrefixQueue(FirstComeQueue):
    """By priority, then those with most in the prefix cache, so that it is used before it is evicted.

    Whoever had to give its pages back comes first, and so does the oldest once it has been overtaken
    often enough; see ``PrefixOrder``. Only the first ``LOOK_AHEAD`` of a priority are compared.
    """

    def __init__(self, blocks: BlockManager) -> None:
        order = PrefixOrder(blocks)
        super().__init__(order)
        self._lengths = order.lengths

    def offers(self) -> Iterator[Sequence]:
        self._lengths.refresh(islice(self._waiting, LOOK_AHEAD))
        return self._by_rank()
