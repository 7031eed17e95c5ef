from __future__ import annotations

import zlib

import pytest

from octavo.block_manager import BlockManager
from octavo.scheduler import LatencyGoal, Limits, SampleResult, Scheduler, Sequence, Status
from octavo.scheduler.waiting.line import MAX_OVERTAKEN
from waiting_queues import QUEUES

TOKEN_S = 0.1  # per prompt token


class Clock:
    """A scheduler that runs one sequence at a time, with 100 ms per token."""

    def __init__(self, kind: str, *, num_pages: int = 256, running: int = 1) -> None:
        blocks = BlockManager(num_pages, 4)
        self.scheduler = Scheduler(blocks, Limits(64, running), waiting=QUEUES[kind](blocks))
        self.now = 0.0
        self.order: list[str] = []  # order of admission
        self.add("before", 20)
        self.step()
        self.order.clear()

    def add(
        self,
        name: str,
        length: int = 10,
        *,
        within: float | None = None,
        tenant: str = "",
        max_tokens: int = 1,
    ) -> Sequence:
        by = None if within is None else self.now + within
        prompt = [zlib.crc32(name.encode()), *range(length - 1)]
        sequence = Sequence(name, prompt, max_tokens, tenant=tenant, latency=LatencyGoal(None, by))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        step = self.scheduler.plan(self.now)
        assert step is not None
        self.scheduler.commit(step, [SampleResult(7)] * len(step.sampled()))
        seconds = TOKEN_S * step.num_tokens
        self.scheduler.observe(step, seconds)
        self.now += seconds
        if step.lookups:
            self.order += [lookup.sequence.sequence_id for lookup in step.lookups]

    def serve(self) -> list[str]:
        while self.scheduler.has_work:
            self.step()
        return self.order


@pytest.mark.parametrize("kind", QUEUES)
def test_late_sequences_yield_to_sequences_still_in_time(kind: str) -> None:
    clock = Clock(kind)
    clock.add("late", within=0.9)  # its ten tokens take a second
    clock.add("whenever")
    clock.add("soon", within=2.1)
    clock.add("too late by then", within=2.9)
    assert clock.serve() == ["whenever", "soon", "late", "too late by then"]


@pytest.mark.parametrize("kind", QUEUES)
def test_cached_tokens_count_as_prefilled_for_deadlines(kind: str) -> None:
    clock = Clock(kind)
    clock.add("before", 20, within=1.0)
    clock.add("other")
    assert clock.serve() == ["before", "other"]


def test_deadlines_do_not_affect_other_tenants() -> None:
    clock = Clock("vtc")
    clock.add("a1", tenant="a", within=0.1)
    clock.add("a2", tenant="a")
    clock.add("b1", tenant="b")
    clock.add("b2", tenant="b")
    assert clock.serve() == ["a2", "b1", "a1", "b2"]


@pytest.mark.parametrize("kind", QUEUES)
def test_late_sequences_are_overtaken_a_bounded_number_of_times(kind: str) -> None:
    clock = Clock(kind, num_pages=1000)
    clock.add("late", within=0.1)
    while "late" not in clock.order:
        clock.add(f"other {len(clock.order)}", within=1.5)
        clock.step()
    assert len(clock.order) == 1 + MAX_OVERTAKEN


@pytest.mark.parametrize("kind", QUEUES)
def test_preempted_sequences_are_never_late(kind: str) -> None:
    clock = Clock(kind, num_pages=8, running=3)
    clock.add("oldest", 12, within=10.0, max_tokens=12)
    victim = clock.add("victim", 12, within=10.0, max_tokens=12)
    while not victim.history.num_preempted:
        clock.step()
    clock.now += 1000.0
    clock.add("other", within=1000.0)
    clock.serve()
    assert clock.order == ["oldest", "victim", "other"]
    assert victim.status is Status.FINISHED
