"""Longest cached prefix first, within a bound on how often the oldest is overtaken."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice

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
        super().__init__()
        self._order = PrefixOrder(blocks)

    def offers(self) -> Iterator[Sequence]:
        self._order.lengths.refresh(islice(self._waiting, LOOK_AHEAD))
        for _, group in groupby(tuple(self._waiting), key=lambda s: s.priority):
            equals = list(group)
            ranks = sorted(self._order.rank(equals[:LOOK_AHEAD]), key=lambda rank: rank[:2])
            yield from (sequence for _, _, sequence in ranks)
            yield from equals[LOOK_AHEAD:]

    def put_back(self, sequence: Sequence) -> None:
        super().put_back(sequence)
        self._order.interrupt(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._order.leaves(sequence, (s for s in self._waiting if s.priority == sequence.priority))
        super().remove(sequence)

    def replace(self, sequence: Sequence, heir: Sequence) -> None:
        super().replace(sequence, heir)
        self._order.replace(sequence, heir)
