"""No request waits forever: see preemption-bounds.md and latency-bounds.md in docs/design."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.block_manager import BlockManager
from octavo.scheduler import Limits, SampleResult, Scheduler, Sequence, Status
from octavo.scheduler.waiting import line
from waiting_queues import QUEUES

PAGE_SIZE = 4
OVERTAKEN, PASSED = 2, 4  # instead of 32 and 256, so that these tests reach them


@dataclass(frozen=True)
class Job:
    prompt: int
    outputs: int
    samples: int = 1

    @property
    def num_pages(self) -> int:
        return -(-(self.prompt + self.outputs) // PAGE_SIZE)


@dataclass(frozen=True)
class Traffic:
    """Jobs that repeat endlessly; ``backlog`` requests always wait."""

    jobs: tuple[Job, ...]
    spare_pages: int
    max_running: int
    budget: int
    backlog: int
    num_tenants: int = 1
    prefix_cache: bool = True

    @property
    def most_preemptions(self) -> int:
        """Return K of docs/design/preemption-bounds.md."""
        return max(job.samples * job.num_pages for job in self.jobs).bit_length()


@dataclass(eq=False)
class Request:
    samples: list[Sequence]
    num_before: int
    num_older: int
    came_at: int
    has_begun: bool = False

    @property
    def has_ended(self) -> bool:
        return all(sample.status is Status.FINISHED for sample in self.samples)


class Flood:
    def __init__(self, traffic: Traffic, kind: str) -> None:
        largest = max(job.num_pages for job in traffic.jobs)
        blocks = BlockManager(largest + traffic.spare_pages, PAGE_SIZE, prefix_cache=traffic.prefix_cache)
        limits = Limits(traffic.budget, min(traffic.max_running, traffic.budget))
        self.traffic = traffic
        self.scheduler = Scheduler(blocks, limits, waiting=QUEUES[kind](blocks))
        self.has_lines = kind in ("vtc", "dlpm") or traffic.num_tenants > 1
        self.requests: dict[Sequence, Request] = {}
        self.num_let_in: dict[str, int] = defaultdict(int)
        self.num_steps = self.number = 0

    def step(self) -> None:
        while self.scheduler.num_waiting < self.traffic.backlog:
            self._send()
        step = self.scheduler.plan()
        assert step is not None, "nobody gets on"
        self.scheduler.commit(step, [SampleResult(7) for _ in step.sampled()])
        self.num_steps += 1
        for lookup in step.lookups:
            self.requests[lookup.sequence].has_begun = True
            self.num_let_in[self._line(lookup.sequence)] += 1
        for first, request in list(self.requests.items()):
            self._check(first, request)
        begun: dict[str, int] = defaultdict(int)
        for first, request in self.requests.items():
            begun[self._line(first)] += request.has_begun
        assert max(begun.values(), default=0) <= self.scheduler.limits.max_running + OVERTAKEN

    def _send(self) -> None:
        job = self.traffic.jobs[self.number % len(self.traffic.jobs)]
        tenant = str(self.number % self.traffic.num_tenants)
        samples = [
            Sequence(f"{self.number}.{i}", [self.number] * job.prompt, job.outputs, tenant=tenant)
            for i in range(job.samples)
        ]
        first = samples[0]
        first.parallel_samples = samples[1:]
        line = self._line(first)
        older = sum(not each.has_begun for other, each in self.requests.items() if self._line(other) == line)
        self.requests[first] = Request(samples, self.num_let_in[line], older, self.num_steps)
        self.scheduler.add(first)
        self.number += 1

    def _line(self, sequence: Sequence) -> str:
        return sequence.tenant if self.has_lines else ""

    def _check(self, first: Sequence, request: Request) -> None:
        if request.has_ended:
            del self.requests[first]
            return
        most, running = self.traffic.most_preemptions, self.scheduler.limits.max_running
        place = request.num_older + 1
        if not request.has_begun:
            overtaken = self.num_let_in[self._line(first)] - request.num_before
            assert overtaken <= (PASSED + running) * place
        assert max(sample.history.num_preempted for sample in request.samples) <= most
        if not self.has_lines:
            longest = max(job.samples * (job.prompt + job.outputs) for job in self.traffic.jobs)
            others = (PASSED + running) * place + (running + OVERTAKEN) * (most + 2)
            assert self.num_steps - request.came_at <= (most + 1) * longest * others


def flood(traffic: Traffic, kind: str, num_steps: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line, "MAX_OVERTAKEN", OVERTAKEN)
        patch.setattr(line, "HARD_MAX_OVERTAKEN", PASSED)
        served = Flood(traffic, kind)
        for _ in range(num_steps):
            served.step()


jobs = st.builds(Job, st.integers(1, 30), st.integers(1, 30), st.sampled_from([1, 1, 1, 3]))
short_jobs = st.builds(Job, st.integers(1, 4), st.integers(8, 40))
traffic = st.builds(
    Traffic,
    jobs=st.lists(st.one_of(jobs, short_jobs, short_jobs), min_size=2, max_size=6).map(tuple),
    spare_pages=st.integers(0, 6),
    max_running=st.integers(1, 5),
    budget=st.integers(5, 12),
    backlog=st.integers(1, 6),
    num_tenants=st.integers(1, 2),
    prefix_cache=st.booleans(),
)


@pytest.mark.property
@pytest.mark.parametrize("kind", QUEUES)
@settings(max_examples=40)
@given(traffic=traffic)
def test_all_are_admitted_and_end_within_the_bounds(kind: str, traffic: Traffic) -> None:
    flood(traffic, kind, num_steps=200)


def test_samples_are_as_old_as_the_request_they_belong_to() -> None:
    s = Scheduler(BlockManager(64, PAGE_SIZE), Limits(16, 2))
    before = Sequence("before", [1] * 3, 1)
    before.history.num_overtaken = 5
    family = [Sequence(f"sample {i}", [2] * 3, 4) for i in range(4)]
    family[0].parallel_samples = family[1:]
    for sequence in (before, family[0]):
        s.add(sequence)
    step = s.plan()
    assert step is not None
    assert before.history.num_overtaken == 0, "it starts anew"
    s.abort(family[0])
    s.commit(step, [SampleResult(7) for _ in step.sampled()])
    assert [sample.status for sample in family[1:]] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    assert [sample.history.num_admitted_before for sample in family[1:]] == [1, 1, 1]
