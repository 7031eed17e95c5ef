from __future__ import annotations

import heapq
import math
from collections import abc, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from operator import itemgetter

from octavo.block_manager import BlockManager

from ..types import ScheduledChunk, Sequence
from .queue import LOOK_AHEAD, PriorityClass, WaitingQueue

PROMPT_COST = 1.0  # cost of a prompt token that was not in the prefix cache
OUTPUT_COST = 2.0  # cost of a generated token

SHORT_STEPS = 8
"""One step in this many may end early, so that a tenant gets its first token soon, even if prompts of other
tenants would fit into the step."""

MAX_COUNTERS = 4096

_SEQUENCE = itemgetter(ScheduledChunk._fields.index("sequence"))
_PARALLEL_SAMPLES = itemgetter(ScheduledChunk._fields.index("parallel_samples"))


class FairQueue(WaitingQueue):
    """Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).

    Each tenant has a counter per priority: the cost of its tokens so far, divided by its weight. The waiting
    tenant with the smallest counter is next. When a tenant returns, its counter is lifted to the smallest
    counter of the waiting tenants. No token is charged twice, so recomputation after a preemption is free.
    docs/design/fairness-bounds.md bounds the difference of two counters.
    """

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        head_start: float = 0.0,
        blocks: BlockManager | None = None,
    ) -> None:
        """Begin without tenants. Raise ValueError for a weight that is not above 0.

        weights      weight by tenant, 1 by default; service is proportional to the weight
        """
        super().__init__(blocks)
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            if not 0 < weight < float("inf"):
                raise ValueError(f"the weight of tenant {tenant} must be above 0, got {weight:g}; 1 is usual")
        self.head_start = head_start
        self._since_short = SHORT_STEPS
        self._is_short = False
        self._unsettled: dict[Sequence, None] = {}

    def service_of(self, tenant: str, priority: int = 0) -> float:
        self._settle()
        found = self._classes.get(priority)
        return found.service.get(tenant, 0.0) if found is not None else 0.0

    def admission_order(self) -> Iterator[Sequence]:
        self._settle()
        return super().admission_order()

    def waiting_prompts(self, running: Sequence) -> Iterable[Sequence]:
        return islice(self._queue(running), LOOK_AHEAD)

    def served_less(self, running: Sequence) -> Iterable[Sequence]:
        queues = self._class(running.priority).queues
        others = (self._ordered(queue) for tenant, queue in queues.items() if tenant != running.tenant)
        claim = self._service(running) + self._remaining_cost(running)
        behind = (each for each in others if self._service(each[0]) + self._remaining_cost(each[0]) <= claim)
        return islice(chain.from_iterable(behind), LOOK_AHEAD)

    def prefill_order(self, running: list[Sequence]) -> list[Sequence]:
        """Return running prompts, ordered by the counter that their tenant will have at the prompt's end.

        This is weighted fair queueing.
        """
        return sorted(running, key=lambda s: (s.priority, self._service(s) + self._remaining_cost(s)))

    def victim(self, candidates: list[Sequence], lost_work: Callable[[Sequence], int]) -> Sequence:
        """Return the sequence to preempt: lowest priority, then most served tenant, then least lost work."""
        lowest = candidates[-1].priority
        most = max(self._service(sequence) for sequence in candidates if sequence.priority == lowest)
        served = [s for s in candidates if s.priority == lowest and self._service(s) == most]
        return super().victim(served, lost_work)

    def has_precedence(self, sequence: Sequence, other: Sequence) -> bool:
        """Return whether the tenant of ``sequence`` was served no more than the tenant of ``other``."""
        return self._service(sequence) <= self._service(other)

    def ends_step(
        self, sequence: Sequence, work: abc.Sequence[ScheduledChunk], next_one: Sequence | None = None
    ) -> bool:
        """Return whether the step ends before this prompt, to speed up a first token of another tenant.

        At most one step in ``SHORT_STEPS`` ends early, because each step has a fixed cost.
        """
        if self._since_short < SHORT_STEPS:
            return False
        ends = next_one is not None or any(
            item.samples and item.stop - item.start > 1 and item.sequence.tenant != sequence.tenant
            for item in work
        )
        self._is_short = self._is_short or ends
        return ends

    def on_admitted(self, sequence: Sequence) -> None:
        sequence.history.num_charged = max(sequence.history.num_charged, sequence.num_written)

    def on_planned(self, item: ScheduledChunk) -> None:
        self._charge(item.sequence, min(item.stop, item.sequence.num_prompt))

    def on_computed(self, work: abc.Sequence[ScheduledChunk]) -> None:
        self._since_short = 0 if self._is_short else self._since_short + 1
        self._is_short = False
        self._unsettled.update(dict.fromkeys(map(_SEQUENCE, work)))
        for sample in chain.from_iterable(map(_PARALLEL_SAMPLES, work)):
            sample.history.num_charged = sample.num_prompt
            self._unsettled[sample] = None

    def _settle(self) -> None:
        for sequence in self._unsettled:
            if len(sequence.tokens) > sequence.num_prompt:
                self._charge(sequence, len(sequence.tokens))
        self._unsettled.clear()

    def _charge(self, sequence: Sequence, stop: int) -> None:
        start, num_prompt, tenant = sequence.history.num_charged, sequence.num_prompt, sequence.tenant
        if stop <= start:
            return
        sequence.history.num_charged = stop
        prompt = min(stop, num_prompt) - min(start, num_prompt)
        cost = (stop - start - prompt) * OUTPUT_COST + prompt * PROMPT_COST
        service = self._class(sequence.priority).service
        service[tenant] = service.get(tenant, 0.0) + cost / self._weights.get(tenant, 1.0)

    def _remaining_cost(self, sequence: Sequence) -> float:
        return sequence.backlog * PROMPT_COST / self._weights.get(sequence.tenant, 1.0)

    def _service(self, sequence: Sequence) -> float:
        return self.service_of(sequence.tenant, sequence.priority)

    def _queue_name(self, sequence: Sequence) -> str:
        return sequence.tenant

    def _open_queue(self, sequence: Sequence) -> deque[Sequence]:
        self._settle()
        return super()._open_queue(sequence)

    def _on_tenant_waiting(self, priority_class: PriorityClass, tenant: str) -> None:
        service = priority_class.service
        if priority_class.queues:
            floor = min([service.get(other, 0.0) for other in priority_class.queues])
        else:
            floor = service.get(priority_class.last_left or "", 0.0)
        level = priority_class.level = max(priority_class.level, floor)
        self._forget_absent(priority_class, level - self.head_start)
        service[tenant] = max(service.get(tenant, 0.0), level - self.head_start)

    def _forget_absent(self, priority_class: PriorityClass, floor: float) -> None:
        service, queues = priority_class.service, priority_class.queues
        if len(service) <= MAX_COUNTERS:
            return
        for name in [name for name, value in service.items() if value <= floor and name not in queues]:
            del service[name]

    def _choose(self, priority_class: PriorityClass) -> Iterator[Sequence]:
        service = priority_class.service
        heap = [(service[tenant], index, tenant, 0) for index, tenant in enumerate(priority_class.queues)]
        heapq.heapify(heap)
        lines: dict[str, abc.Sequence[Sequence]] = {}
        while heap:
            _, index, tenant, passed = heap[0]
            line = lines.get(tenant)
            if line is None:
                line = lines[tenant] = tuple(islice(self._ordered(priority_class.queues[tenant]), LOOK_AHEAD))
            if passed == len(line):
                heapq.heappop(heap)
                continue
            yield line[passed]
            heapq.heapreplace(heap, (service[tenant], index, tenant, passed + 1))


DEFAULT_QUANTUM = 4096.0  # units of cost: a few prompts, or one long prompt


class DeficitQueue(FairQueue):
    """DLPM (Cao et al., "Locality-aware Fair Scheduling in LLM Serving", 2025).

    A waiting tenant may be served until its counter reaches a level. Among these tenants, the request with
    most cached tokens is admitted first. When all waiting tenants have reached the level, it rises by whole
    quanta.
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

    def may_overtake(self, blocked: Sequence, sequence: Sequence) -> bool:
        if sequence.priority != blocked.priority:
            return False
        return self._order.may_overtake(sequence, self._queue(sequence))

    def _on_tenant_waiting(self, priority_class: PriorityClass, tenant: str) -> None:
        floor = priority_class.level - self.quantum
        self._forget_absent(priority_class, floor)
        priority_class.service[tenant] = max(priority_class.service.get(tenant, 0.0), floor)

    def _choose(self, priority_class: PriorityClass) -> Iterator[Sequence]:
        queues, service = priority_class.queues, priority_class.service
        offered: set[Sequence] = set()
        while queues:
            least = min([service[tenant] for tenant in queues])
            if least >= priority_class.level:
                priority_class.level = self._raise_level(priority_class.level, least)
            fresh = [sequence for sequence in self._ranked(priority_class) if sequence not in offered]
            if not fresh:
                return
            for sequence in fresh:
                offered.add(sequence)
                if service[sequence.tenant] < priority_class.level:
                    yield sequence

    def _raise_level(self, level: float, least: float) -> float:
        raised = level + ((least - level) // self.quantum + 1) * self.quantum
        return raised if least < raised < math.inf else math.nextafter(least, math.inf)

    def _ranked(self, priority_class: PriorityClass) -> list[Sequence]:
        queues, service, level = priority_class.queues, priority_class.service, priority_class.level
        able = [queue for tenant, queue in queues.items() if service[tenant] < level]
        looked_at = max(1, LOOK_AHEAD // max(1, len(able)))
        compared = [list(islice(queue, looked_at)) for queue in able]
        assert self._order.lengths is not None
        self._order.lengths.refresh(chain.from_iterable(compared))
        compared.sort(key=lambda queue: service[queue[0].tenant])
        ranks = [rank for queue in compared for rank in self._order.rank(queue)]
        ranks.sort(key=lambda rank: rank[:2])
        return [sequence for _, _, sequence in ranks]
