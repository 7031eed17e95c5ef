from __future__ import annotations

import heapq
import math
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter

from octavo.block_manager import BlockManager

from ..types import ScheduledChunk, Sequence
from .cached_lengths import CachedLengths
from .line import Line, in_order

LOOK_AHEAD = 256  # waiting sequences that a step may skip in search of one to admit
MAX_IDLE_CLASSES = 64
MAX_COUNTERS = 4096

PROMPT_COST = 1.0  # cost of a prompt token that was not in the prefix cache
OUTPUT_COST = 2.0  # cost of a generated token
DEFAULT_QUANTUM = 4096.0  # units of cost: a few prompts, or one long prompt

SHORT_STEPS = 8
"""One step in this many may end early, so that a tenant gets its first token soon, even if prompts of other
tenants would fit into the step."""

_SEQUENCE = itemgetter(ScheduledChunk._fields.index("sequence"))
_PARALLEL_SAMPLES = itemgetter(ScheduledChunk._fields.index("parallel_samples"))


@dataclass(slots=True)
class PriorityClass:
    lines: dict[str, Line] = field(default_factory=dict)
    service: dict[str, float] = field(default_factory=dict)
    level: float = 0.0
    last_left: str | None = None


class WaitingQueue:
    """Sequences that wait for admission, ordered by priority, tenant and rank in their ``Line``.

    It also chooses which running sequence is preempted, and the order of running prompts.

    With ``weights``, tenants have virtual token counters (Sheng et al., "Fairness in Serving Large Language
    Models", OSDI 2024). Each tenant has a counter per priority: the cost of its tokens so far, divided by its
    weight. The waiting tenant with the smallest counter is next. When a tenant returns, its counter is lifted
    to the smallest counter of the waiting tenants. No token is charged twice, so recomputation after a
    preemption is free. docs/design/fairness-bounds.md bounds the difference of two counters.

    With ``weights`` and ``blocks``, it is DLPM (Cao et al., "Locality-aware Fair Scheduling in LLM Serving",
    2025). A waiting tenant may be served until its counter reaches a level. Among these tenants, the request
    with most cached tokens is admitted first. When all waiting tenants have reached the level, it rises by
    whole quanta.
    """

    def __init__(
        self,
        blocks: BlockManager | None = None,
        weights: Mapping[str, float] | None = None,
        *,
        quantum: float = 0.0,
    ) -> None:
        """Begin without sequences. Raise ValueError for a weight that is not above 0.

        blocks   prefix cache; prompts with most cached tokens come first (None: oldest first)
        weights  weight by tenant, 1 by default; service is proportional to it (None: tenants do not count)
        quantum  units of cost by which the counter of a returning tenant stays below the level
        """
        self._lengths = CachedLengths(blocks)
        self._by_length = blocks is not None
        self._by_tenant = weights is not None
        self._by_level = self._by_tenant and self._by_length
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            if not 0 < weight < float("inf"):
                raise ValueError(f"the weight of tenant {tenant} must be above 0, got {weight:g}; 1 is usual")
        assert quantum > 0 or not self._by_level, f"the level cannot rise by {quantum:g}"
        self._quantum = quantum
        self._late: Set[Sequence] = frozenset()
        self._classes: dict[int, PriorityClass] = {}
        self._size = 0
        self._since_short = SHORT_STEPS
        self._is_short = False
        self._unsettled: dict[Sequence, None] = {}

    def set_late(self, late: Set[Sequence]) -> None:
        """Admit these sequences after those that can still meet their deadline."""
        self._late = late

    def service_of(self, tenant: str, priority: int = 0) -> float:
        self._settle()
        found = self._classes.get(priority)
        return found.service.get(tenant, 0.0) if found is not None else 0.0

    def admission_order(self) -> Iterator[Sequence]:
        """Yield sequences that may be admitted now, in order. Callers may remove a yielded sequence."""
        self._settle()
        for priority in sorted(self._classes):
            choose = self._below_level if self._by_level else self._least_served
            yield from choose(self._classes[priority])

    def __iter__(self) -> Iterator[Sequence]:
        for priority in sorted(self._classes):
            yield from chain.from_iterable(self._classes[priority].lines.values())

    def __len__(self) -> int:
        return self._size

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and sequence in self._line(sequence)

    def append(self, sequence: Sequence) -> None:
        """Add a sequence that was never admitted, behind the others of its line."""
        self._open_line(sequence).append(sequence)
        self._size += 1

    def put_back(self, sequence: Sequence) -> None:
        """Add a preempted sequence before those of its line that were never admitted."""
        self._open_line(sequence).put_back(sequence)
        self._size += 1

    def remove(self, sequence: Sequence) -> None:
        self._lengths.forget(sequence)
        line = self._line(sequence)
        line.remove(sequence)
        self._size -= 1
        if not line:
            priority_class, name = self._class(sequence.priority), self._name(sequence)
            del priority_class.lines[name]
            priority_class.last_left = name

    def replace(self, sequence: Sequence, successor: Sequence) -> None:
        self._lengths.forget(sequence)
        self._line(sequence).replace(sequence, successor)

    def may_overtake(self, blocked: Sequence, sequence: Sequence) -> bool:
        """Return whether ``sequence`` may overtake ``blocked``, which waits for a long prompt or a page."""
        are_equal = self._by_level and blocked.priority == sequence.priority
        return (are_equal or self._share_line(blocked, sequence)) and self._line(sequence).may_overtake(
            sequence
        )

    def delays(self, running: Sequence, sequence: Sequence) -> bool:
        """Return whether the long prompt ``sequence`` must wait for the long prompt ``running``."""
        return running.priority < sequence.priority or self._share_line(running, sequence)

    def waiting_prompts(self, running: Sequence) -> Iterable[Sequence]:
        return islice(self._line(running) if self._by_tenant else self, LOOK_AHEAD)

    def served_less(self, running: Sequence) -> Iterable[Sequence]:
        own, claim = self._name(running), self._claim(running)
        lines = self._class(running.priority).lines
        others = (self._ordered(line) for name, line in lines.items() if name != own)
        behind = (chain((first,), each) for each in others if self._claim(first := next(each)) <= claim)
        return islice(chain.from_iterable(behind), LOOK_AHEAD)

    def prefill_order(self, running: list[Sequence]) -> list[Sequence]:
        """Return running prompts, ordered by the counter that their tenant will have at the prompt's end.

        This is weighted fair queueing.
        """
        if not self._by_tenant:
            return running
        return sorted(running, key=lambda sequence: (sequence.priority, self._claim(sequence)))

    def victim(self, candidates: list[Sequence], lost_work: Callable[[Sequence], int]) -> Sequence:
        """Return the sequence to preempt: lowest priority, then most served tenant, then least lost work."""
        lowest = candidates[-1].priority
        equals = [sequence for sequence in reversed(candidates) if sequence.priority == lowest]
        most = max(map(self._service, equals))
        return min((each for each in equals if self._service(each) == most), key=lost_work)

    def has_precedence(self, sequence: Sequence, other: Sequence) -> bool:
        """Return whether the tenant of ``sequence`` was served no more than the tenant of ``other``."""
        return self._service(sequence) <= self._service(other)

    def ends_step(
        self, sequence: Sequence, work: abc.Sequence[ScheduledChunk], next_one: Sequence | None = None
    ) -> bool:
        """Return whether the step ends before this prompt, to speed up a first token of another tenant.

        At most one step in ``SHORT_STEPS`` ends early, because each step has a fixed cost.
        """
        if self._since_short < SHORT_STEPS or not self._by_tenant:
            return False
        ends = next_one is not None or any(
            item.samples and item.stop - item.start > 1 and item.sequence.tenant != sequence.tenant
            for item in work
        )
        self._is_short = self._is_short or ends
        return ends

    def on_admitted(self, sequence: Sequence) -> None:
        """Record that a sequence was admitted; its table has the cached prefix."""
        sequence.history.num_charged = max(sequence.history.num_charged, sequence.num_written)

    def on_planned(self, item: ScheduledChunk) -> None:
        """Record that a chunk of a prompt was added to the step."""
        self._charge(item.sequence, min(item.stop, item.sequence.num_prompt))

    def on_computed(self, work: abc.Sequence[ScheduledChunk]) -> None:
        """Record that a step is committed and its tokens are appended."""
        if not self._by_tenant:
            return
        self._since_short = 0 if self._is_short else self._since_short + 1
        self._is_short = False
        self._unsettled.update(dict.fromkeys(map(_SEQUENCE, work)))
        for sample in chain.from_iterable(map(_PARALLEL_SAMPLES, work)):
            sample.history.num_charged = sample.num_prompt
            self._unsettled[sample] = None

    def _least_served(self, priority_class: PriorityClass) -> Iterator[Sequence]:
        service = priority_class.service
        heap = [
            (service[name], index, name, self._ordered(line, by_length=True))
            for index, (name, line) in enumerate(priority_class.lines.items())
        ]
        heapq.heapify(heap)
        while heap:
            _, index, name, line = heap[0]
            if (sequence := next(line, None)) is None:
                heapq.heappop(heap)
                continue
            yield sequence
            heapq.heapreplace(heap, (service[name], index, name, line))

    def _ordered(self, line: Line, *, by_length: bool = False) -> Iterator[Sequence]:
        sequences = [*islice(line, LOOK_AHEAD if self._by_tenant else None)]
        if by_length := by_length and self._by_length:
            self._lengths.refresh(sequences[:LOOK_AHEAD])
        if by_length or self._late:
            sequences[:LOOK_AHEAD] = in_order(line.ranks(LOOK_AHEAD, self._late, self._lengths.of))
        yield from sequences

    def _below_level(self, priority_class: PriorityClass) -> Iterator[Sequence]:
        lines, service = priority_class.lines, priority_class.service
        offered: set[Sequence] = set()
        while lines:
            least = min([service[name] for name in lines])
            if least >= (level := priority_class.level):
                raised = level + ((least - level) // self._quantum + 1) * self._quantum
                is_higher = least < raised < math.inf
                priority_class.level = raised if is_higher else math.nextafter(least, math.inf)
            able = [name for name in lines if service[name] < priority_class.level]
            looked_at = max(1, LOOK_AHEAD // max(1, len(able)))
            self._lengths.refresh(chain.from_iterable(islice(lines[name], looked_at) for name in able))
            able.sort(key=service.__getitem__)
            ranks = [lines[name].ranks(looked_at, self._late, self._lengths.of) for name in able]
            fresh = [each for each in in_order(chain.from_iterable(ranks)) if each not in offered]
            if not fresh:
                return
            for sequence in fresh:
                offered.add(sequence)
                if service[sequence.tenant] < priority_class.level:
                    yield sequence

    def _settle(self) -> None:
        for sequence in self._unsettled:
            if len(sequence.tokens) > sequence.num_prompt:
                self._charge(sequence, len(sequence.tokens))
        self._unsettled.clear()

    def _charge(self, sequence: Sequence, stop: int) -> None:
        start, num_prompt, tenant = sequence.history.num_charged, sequence.num_prompt, sequence.tenant
        if stop <= start or not self._by_tenant:
            return
        sequence.history.num_charged = stop
        prompt = min(stop, num_prompt) - min(start, num_prompt)
        cost = (stop - start - prompt) * OUTPUT_COST + prompt * PROMPT_COST
        service = self._class(sequence.priority).service
        service[tenant] = service.get(tenant, 0.0) + cost / self._weights.get(tenant, 1.0)

    def _service(self, sequence: Sequence) -> float:
        return self.service_of(sequence.tenant, sequence.priority)

    def _claim(self, sequence: Sequence) -> float:
        remaining = sequence.backlog * PROMPT_COST / self._weights.get(sequence.tenant, 1.0)
        return self._service(sequence) + remaining

    def _name(self, sequence: Sequence) -> str:
        return sequence.tenant if self._by_tenant else ""

    def _share_line(self, one: Sequence, other: Sequence) -> bool:
        return one.priority == other.priority and self._name(one) == self._name(other)

    def _class(self, priority: int) -> PriorityClass:
        found = self._classes.get(priority)
        if found is None:
            found = self._classes[priority] = PriorityClass()
            idle = [other for other, each in self._classes.items() if not each.lines]
            for other in idle[: max(0, len(idle) - MAX_IDLE_CLASSES - 1)]:
                del self._classes[other]
        return found

    def _line(self, sequence: Sequence) -> Line:
        return self._class(sequence.priority).lines.get(self._name(sequence)) or Line()

    def _open_line(self, sequence: Sequence) -> Line:
        self._settle()
        priority_class, name = self._class(sequence.priority), self._name(sequence)
        line = priority_class.lines.get(name)
        if line is None:
            self._lift(priority_class, name)
            line = priority_class.lines[name] = Line()
        return line

    def _lift(self, priority_class: PriorityClass, name: str) -> None:
        service, lines = priority_class.service, priority_class.lines
        if not self._by_level:
            waiting = [service.get(other, 0.0) for other in lines or (priority_class.last_left or "",)]
            priority_class.level = max(priority_class.level, min(waiting))
        floor = priority_class.level - self._quantum
        if len(service) > MAX_COUNTERS:
            for other in [each for each, value in service.items() if value <= floor and each not in lines]:
                del service[other]
        service[name] = max(service.get(name, 0.0), floor)
