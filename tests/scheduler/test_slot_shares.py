from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from octavo.block_manager import BlockManager, RecurrentState
from octavo.scheduler import Limits, SampleResult, Scheduler, SchedulerOutput, Sequence, Status
from octavo.scheduler.waiting import WaitingQueue
from serving import check_shares

SLOTS = 16
QUEUES: dict[str, Callable[[BlockManager], WaitingQueue]] = {
    "fcfs": lambda _: WaitingQueue(),
    "lpm": WaitingQueue,
    "vtc": lambda _: WaitingQueue(weights={}, quantum=64.0),
    "dlpm": lambda blocks: WaitingQueue(blocks, {}, quantum=64.0),
}
ENOUGH = 1024  # pages
every_queue = pytest.mark.parametrize("queue", QUEUES)


@dataclass
class Load:
    scheduler: Scheduler

    @classmethod
    def of(
        cls, queue: str = "fcfs", *, num_pages: int = ENOUGH, states: RecurrentState | None = None
    ) -> Load:
        blocks = BlockManager(num_pages, 4, states=states)
        return cls(Scheduler(blocks, Limits(64, SLOTS), waiting=QUEUES[queue](blocks)))

    def add(
        self, name: str, n: int = 1, length: int = 9, max_tokens: int = 80, *, priority: int = 0
    ) -> list[Sequence]:
        """Add samples of one request; their tenant is the name without digits at its end."""
        tenant, prompt = name.rstrip("0123456789"), [len(name), *name.encode()[:3], *range(length - 4)]
        samples = [
            Sequence(f"{name}.{i}", list(prompt), max_tokens, tenant=tenant, priority=priority)
            for i in range(n)
        ]
        samples[0].parallel_samples = samples[1:]
        self.scheduler.add(samples[0])
        return samples

    def step(self) -> SchedulerOutput | None:
        step = self.scheduler.plan()
        check_shares(self.scheduler)
        if step is not None:
            self.scheduler.commit(step, [SampleResult(7) for _ in step.sampled()])
        self.scheduler.blocks.check()
        check_shares(self.scheduler)
        return step

    def steps_to_first_token(self, sequence: Sequence) -> int:
        for count in range(1, 200):
            self.step()
            if len(sequence.tokens) > sequence.num_prompt:
                return count
        raise AssertionError("no token in 200 steps")

    def running(self) -> Counter[str]:
        return Counter(sequence.tenant for sequence in self.scheduler._queues.running)

    def finish(self) -> int:
        num_preempted = 0
        for _ in range(5000):
            if not self.scheduler.has_work:
                return num_preempted
            step = self.step()
            assert step is not None
            num_preempted += len(step.preempted)
        raise AssertionError("no end in sight")


@every_queue
@pytest.mark.parametrize(("n", "begun"), [(SLOTS, 2), (24, 1), (24, 30)])
def test_the_first_token_of_another_tenant_takes_at_most_two_steps(queue: str, n: int, begun: int) -> None:
    load = Load.of(queue)
    mallory = load.add("mallory", n)
    for _ in range(begun):
        load.step()
    assert load.running()["mallory"] == SLOTS if begun > 1 else load.running()["mallory"] >= 1
    (alice,) = load.add("alice")
    assert load.steps_to_first_token(alice) <= 2, "alone it is one"
    load.finish()
    assert all(len(each.tokens) == each.max_length for each in (*mallory, alice))
    assert load.scheduler.blocks.counts.held == 0


@every_queue
def test_tenants_claim_at_most_their_share_of_slots(queue: str) -> None:
    load = Load.of(queue)
    load.add("mallory", 64)
    for _ in range(3):
        load.step()
    alice = [load.add(f"alice{number}", length=5)[0] for number in range(12)]
    for _ in range(4):
        load.step()
    assert load.running() == {"mallory": SLOTS // 2, "alice": SLOTS // 2}
    assert sum(each.status is Status.RUNNING for each in alice) == SLOTS // 2
    (bob,) = load.add("bob")
    assert load.steps_to_first_token(bob) <= 2
    assert load.running()["bob"] == 1
    assert min(load.running()["mallory"], load.running()["alice"]) >= SLOTS // 3
    load.finish()


def test_parallel_samples_are_not_forked_into_slots_that_others_claim() -> None:
    load = Load.of()
    load.add("mallory", 64)
    step = load.scheduler.plan()
    assert step is not None
    (alice,) = load.add("alice")
    load.scheduler.commit(step, [SampleResult(7) for _ in step.sampled()])
    assert load.running()["mallory"] == SLOTS - 1
    assert load.steps_to_first_token(alice) == 1
    load.finish()


def test_requests_one_after_another_do_not_preempt_each_time() -> None:
    load = Load.of()
    load.add("mallory", 64, max_tokens=100)
    load.step()
    load.step()
    preempted = 0
    for number in range(30):
        (alice,) = load.add(f"alice{number}", max_tokens=2)
        while alice.status is not Status.FINISHED:
            step = load.step()
            preempted += 0 if step is None else len(step.preempted)
        for _ in range(5):
            load.step()
    assert preempted <= 6, "not for each of thirty requests"
    load.finish()


def test_a_slot_is_used_again_when_no_other_tenant_comes() -> None:
    load = Load.of()
    load.add("mallory", 64, max_tokens=400)
    load.step()
    load.step()
    load.add("alice", max_tokens=2)
    for _ in range(60):
        load.step()
    assert load.running() == {"mallory": SLOTS}


def test_a_more_urgent_sequence_keeps_its_slot() -> None:
    load = Load.of()
    load.add("mallory", 64, priority=-1, max_tokens=30)
    load.step()
    load.step()
    (alice,) = load.add("alice")
    step = load.step()
    assert step is not None
    assert not step.preempted
    assert alice.status is Status.WAITING
    load.finish()
