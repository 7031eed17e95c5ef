from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.block_manager import BlockManager
from octavo.scheduler import Limits, SampleResult, Scheduler, Sequence
from octavo.scheduler.waiting import WaitingQueue
from serving import Served, check_outputs
from strategies import Workload, workloads

pytestmark = pytest.mark.property

PAGE_SIZE = 4
QUANTUM, HEAD_START = 24.0, 16.0
QUEUES: dict[str, Callable[[BlockManager], WaitingQueue]] = {
    "vtc": lambda _blocks: WaitingQueue(weights={}),
    "dlpm": lambda blocks: WaitingQueue(blocks, {}, quantum=QUANTUM),
    "lpm": WaitingQueue,
}


@pytest.mark.parametrize("kind", QUEUES)
@settings(max_examples=60)
@given(workload=workloads())
def test_outputs_equal_those_served_alone_in_any_order(kind: str, workload: Workload) -> None:
    check_outputs(Served(workload, QUEUES[kind]).run())


@dataclass(frozen=True)
class Traffic:
    """Tenants that always have waiting requests, with repeating lengths."""

    tenants: tuple[tuple[tuple[int, int, int], ...], ...]  # (prompt tokens, output tokens, samples)
    weights: tuple[float, ...]
    budget: int
    max_running: int
    spare_pages: int


jobs = st.tuples(st.integers(1, 40), st.integers(1, 12), st.sampled_from([1, 1, 1, 3]))
traffic = st.builds(
    Traffic,
    tenants=st.lists(st.lists(jobs, min_size=1, max_size=4).map(tuple), min_size=2, max_size=4).map(tuple),
    weights=st.lists(st.sampled_from([1.0, 1.0, 2.0, 0.5]), min_size=4, max_size=4).map(tuple),
    budget=st.integers(8, 48),
    max_running=st.integers(1, 8),
    spare_pages=st.integers(0, 40),
)


class Backlogged:
    def __init__(self, traffic: Traffic, kind: str) -> None:
        self.traffic = traffic
        self.names = [f"t{index}" for index in range(len(traffic.tenants))]
        self.weights = dict(zip(self.names, traffic.weights, strict=False))
        largest = max(
            -(-(prompt + outputs) // PAGE_SIZE) for jobs in traffic.tenants for prompt, outputs, _ in jobs
        )
        self.blocks = BlockManager(largest + traffic.spare_pages, PAGE_SIZE)
        queue: WaitingQueue = (
            WaitingQueue(weights=self.weights, quantum=HEAD_START)
            if kind == "vtc"
            else WaitingQueue(self.blocks, self.weights, quantum=QUANTUM)
        )
        limits = Limits(traffic.budget, min(traffic.max_running, traffic.budget))
        self.scheduler = Scheduler(self.blocks, limits, waiting=queue)
        self.paid: dict[Sequence, int] = {}
        self.service = dict.fromkeys(self.names, 0.0)
        self.history: list[dict[str, float]] = []
        self.before: list[tuple[dict[str, float], set[str]]] = []
        self.away: set[str] = set()
        self.most_at_once = 0
        self._sent: dict[str, int] = defaultdict(int)

    def step(self) -> None:
        for index, name in enumerate(self.names):
            while name not in self.away and self._waiting(name) < self.traffic.max_running + 1:
                self._send(index, name)
        self.before.append((dict(self.service), {name for name in self.names if self._waiting(name)}))
        step = self.scheduler.plan()
        assert step is not None
        self._note_at_once()
        for item in step.work:
            self._pay(item.sequence, min(item.stop, item.sequence.num_prompt), item.start)
        self.scheduler.commit(step, [SampleResult(7) for _ in step.sampled()])
        for sequence in step.sampled():
            self._pay(sequence, len(sequence.tokens), len(sequence.tokens) - 1)
        self.history.append(dict(self.service))

    def bound(self, kind: str) -> float:
        longest = max(prompt for jobs in self.traffic.tenants for prompt, _, _ in jobs)
        most = max(longest, 2 * self.most_at_once) / min(self.weights.values())
        return 2 * (most + (QUANTUM if kind == "dlpm" else HEAD_START))

    def _waiting(self, name: str) -> int:
        return sum(sequence.tenant == name for sequence in self.scheduler._queues.waiting)

    def _send(self, index: int, name: str) -> None:
        number = self._sent[name]
        self._sent[name] += 1
        jobs = self.traffic.tenants[index]
        length, outputs, samples = jobs[number % len(jobs)]
        prompt = [index, *([5] * (length // 2)), *([number] * (length - length // 2 - 1))][:length]
        members = [
            Sequence(f"{name}.{number}.{i}", list(prompt), outputs, tenant=name) for i in range(samples)
        ]
        members[0].parallel_samples = members[1:]
        self.scheduler.add(members[0])

    def _note_at_once(self) -> None:
        tokens: dict[str, int] = defaultdict(int)
        for sequence in self.scheduler._queues.running:
            for member in (sequence, *sequence.parallel_samples):
                tokens[member.tenant] += member.max_length
        self.most_at_once = max(self.most_at_once, *tokens.values(), 0)

    def _pay(self, sequence: Sequence, stop: int, start: int) -> None:
        """Prompt tokens that were not cached cost 1, output tokens 2."""
        first = max(self.paid.get(sequence, 0), start)
        for position in range(first, stop):
            cost = 1.0 if position < sequence.num_prompt else 2.0
            self.service[sequence.tenant] += cost / self.weights[sequence.tenant]
        self.paid[sequence] = max(first, stop)


@pytest.mark.parametrize("kind", ["vtc", "dlpm"])
@settings(max_examples=30)
@given(traffic=traffic)
def test_service_of_two_waiting_tenants_differs_within_the_bound(kind: str, traffic: Traffic) -> None:
    """The bound is 2 max(wp L, wq M), plus two head starts or quanta: docs/design/fairness-bounds.md."""
    load = Backlogged(traffic, kind)
    for _ in range(40):
        load.step()
    bound = load.bound(kind)
    for one in load.names:
        for other in load.names:
            gaps = [service[one] - service[other] for service in load.history]
            assert max(gaps) - min(gaps) <= bound, "over the interval between the two"


@pytest.mark.parametrize("kind", ["vtc", "dlpm"])
@settings(max_examples=30)
@given(traffic=traffic, stays=st.integers(1, 10), pause=st.integers(20, 150))
def test_a_returning_tenant_neither_starves_nor_is_starved(
    kind: str, traffic: Traffic, stays: int, pause: int
) -> None:
    load = Backlogged(traffic, kind)
    for number in range(stays + pause + 40):
        load.away = {load.names[0]} if stays <= number < stays + pause else set()
        load.step()
    bound, first = load.bound(kind), load.names[0]
    for other in load.names[1:]:
        gaps: list[float] = []
        for service, waiting in load.before[stays + pause :]:
            gaps = [*gaps, service[first] - service[other]] if {first, other} <= waiting else []
            assert not gaps or max(gaps) - min(gaps) <= bound
