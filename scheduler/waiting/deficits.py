"""Deficit longest-prefix matching: fair by quanta, and cached prefixes first within a quantum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain, islice

from octavo.block_manager import BlockManager

from ..types import Sequence
from .fair import FairQueue
from .queue import LOOK_AHEAD, PriorityClass

DEFAULT_QUANTUM = 4096.0  # units of cost: a few prompts, or one long one


class DeficitQueue(FairQueue):
    """DLPM (Cao et al., "Locality-aware Fair Scheduling in LLM Serving", 2025).

    A waiting tenant may be served until its counter reaches a level. Requests of such tenants are admitted in
    the order of their cached tokens, ties in the order of ``FairQueue``; running prompts continue in the
    order of ``FairQueue``. When all waiting tenants have reached the level, it rises by whole quanta. So the
    counters of two waiting tenants differ by at most a quantum more than under ``FairQueue``. Within a
    tenant, ``AgeOrder`` bounds overtaking.
    """

    def __init__(
        self,
        blocks: BlockManager,
        weights: Mapping[str, float] | None = None,
        *,
        quantum: float = DEFAULT_QUANTUM,
    ) -> None:
        super().__init__(weights, blocks=blocks)
        if not quantum > 0:
            raise ValueError(
                f"the quantum must be above 0, got {quantum:g}; {DEFAULT_QUANTUM:g} is the default"
            )
        self.quantum = quantum

    def may_pass(self, blocked: Sequence, sequence: Sequence) -> bool:
        if sequence.priority != blocked.priority:
            return False
        return self._order.may_pass(
            sequence, self._lane(sequence)
        )  # only tenants that may be served are offered

    def _begins_to_wait(self, priority_class: PriorityClass, tenant: str) -> None:
        floor = priority_class.level - self.quantum
        self._forget_absent(priority_class, floor)
        priority_class.service[tenant] = max(priority_class.service.get(tenant, 0.0), floor)

    def _choose(self, priority_class: PriorityClass) -> Iterator[Sequence]:
        lanes, service = priority_class.lanes, priority_class.service
        offered: set[Sequence] = set()
        while lanes:
            least = min([service[tenant] for tenant in lanes])
            if least >= priority_class.level:
                priority_class.level = self._raised(priority_class.level, least)
            fresh = [sequence for sequence in self._ranked(priority_class) if sequence not in offered]
            if not fresh:
                return  # tenants that may be served cannot be admitted now
            for sequence in fresh:
                offered.add(sequence)
                if service[sequence.tenant] < priority_class.level:
                    yield sequence

    def _raised(self, level: float, least: float) -> float:
        """Return the level raised by whole quanta above ``least``.

        If rounding leaves it at ``least``, or makes it infinite, it is the next number above.
        """
        raised = level + ((least - level) // self.quantum + 1) * self.quantum
        return raised if least < raised < math.inf else math.nextafter(least, math.inf)

    def _ranked(self, priority_class: PriorityClass) -> list[Sequence]:
        """Return the waiting sequences of tenants that may be served, most cached tokens first."""
        lanes, service, level = priority_class.lanes, priority_class.service, priority_class.level
        able = [lane for tenant, lane in lanes.items() if service[tenant] < level]
        looked_at = max(1, LOOK_AHEAD // max(1, len(able)))
        compared = [list(islice(lane, looked_at)) for lane in able]
        assert self._order.lengths is not None
        self._order.lengths.refresh(chain.from_iterable(compared))
        compared.sort(key=lambda lane: service[lane[0].tenant])  # ties go to the least served tenant
        ranks = [rank for lane in compared for rank in self._order.rank(lane)]
        ranks.sort(key=lambda rank: rank[:2])
        return [sequence for _, _, sequence in ranks]
