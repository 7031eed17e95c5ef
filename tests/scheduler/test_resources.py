from __future__ import annotations

import random
from collections import Counter

import pytest

from octavo.block_manager import BlockManager
from octavo.scheduler import (
    Admission,
    Limits,
    Resource,
    SampleResult,
    Scheduler,
    SchedulerOutput,
    Sequence,
    Status,
)
from octavo.scheduler.waiting import HARD_MAX_OVERTAKEN
from waiting_queues import QUEUES

every_queue = pytest.mark.parametrize("queue", QUEUES)


class KeySlots(Resource):
    """Slots of one key each; a sequence's key is the first letter of its ID, ``-`` for none."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.coming = False
        self.holders: Counter[str] = Counter()  # sequences by key
        self.num_asked = 0

    @property
    def is_pending(self) -> bool:
        return self.coming

    def hold(self, sequence: Sequence) -> Admission:
        self.num_asked += 1
        if self.coming or len(self.keys | {key_of(sequence)} - {"-"}) > self.num_slots:
            return Admission.NO_RESOURCE
        self.holders[key_of(sequence)] += 1
        return Admission.ADMITTED

    def fork(self, sequence: Sequence, sample: Sequence) -> bool:
        assert key_of(sequence) == key_of(sample)
        self.holders[key_of(sample)] += 1
        return True

    def release(self, sequence: Sequence) -> None:
        self.holders[key_of(sequence)] -= 1
        assert self.holders[key_of(sequence)] >= 0

    @property
    def keys(self) -> set[str]:
        return set(+self.holders) - {"-"}


def key_of(sequence: Sequence) -> str:
    return sequence.sequence_id[0]


def serve(slots: KeySlots, queue: str = "fcfs", *, num_pages: int = 64, running: int = 8) -> Scheduler:
    blocks = BlockManager(num_pages, 4)
    return Scheduler(blocks, Limits(16, running), waiting=QUEUES[queue](blocks), resources=(slots,))


def step(scheduler: Scheduler) -> SchedulerOutput | None:
    planned = scheduler.plan()
    if planned is not None:
        scheduler.commit(planned, [SampleResult(7) for _ in planned.sampled()])
    scheduler.blocks.check()
    return planned


def status_of(sequence: Sequence) -> Status:
    return sequence.status


@every_queue
def test_a_sequence_that_lacks_a_slot_is_passed_by_every_tenant(queue: str) -> None:
    slots = KeySlots(1)
    scheduler = serve(slots, queue)
    first, lacks = Sequence("a", [1, 2], 6), Sequence("b", [2, 3], 2, tenant="late")
    passing = [Sequence(f"-{n}", [3 + n, 4], 2, tenant=f"tenant {n % 2}") for n in range(4)]
    for sequence in (first, lacks, *passing):
        scheduler.add(sequence)
    step(scheduler)
    assert first.status is Status.RUNNING
    assert all(each.status is not Status.WAITING for each in passing)
    assert status_of(lacks) is Status.WAITING
    asked = slots.num_asked
    step(scheduler)
    step(scheduler)
    assert slots.num_asked <= asked + 1, "nothing was released but what ended"
    while status_of(first) is not Status.FINISHED:
        step(scheduler)
    step(scheduler)
    assert lacks.status is not Status.WAITING


@every_queue
def test_a_sequence_that_lacks_a_slot_is_not_passed_for_ever(queue: str) -> None:
    slots = KeySlots(1)
    scheduler = serve(slots, queue)
    scheduler.add(Sequence("a", [1, 2], 3))
    step(scheduler)
    lacks = Sequence("b", [1, 2], 2, tenant="late")
    scheduler.add(lacks)
    num_added = 0
    while lacks.status is Status.WAITING:
        scheduler.add(Sequence(f"a{num_added}", [1, 2], 3))
        num_added += 1
        assert num_added < 2 * HARD_MAX_OVERTAKEN, "others with the slot's key came without end"
        step(scheduler)
    least = 2 if queue == "dlpm" else HARD_MAX_OVERTAKEN  # a deficit ends sooner
    assert num_added > least, "others passed it meanwhile"


def test_pending_resources_do_not_count_as_stuck() -> None:
    slots = KeySlots(1)
    slots.coming = True
    scheduler = serve(slots)
    sequence = Sequence("a", [1, 2], 1)
    scheduler.add(sequence)
    assert scheduler.plan() is None
    assert scheduler.is_blocked
    assert not scheduler.stuck()
    slots.coming = False
    assert not scheduler.is_blocked
    assert step(scheduler) is not None
    assert sequence.status is Status.FINISHED


@every_queue
@pytest.mark.parametrize("seed", range(4))
def test_no_hold_and_no_page_is_lost_under_random_load(queue: str, seed: int) -> None:
    rng = random.Random(seed)
    slots = KeySlots(2)
    scheduler = serve(slots, queue, num_pages=12, running=5)
    everyone: list[Sequence] = []
    num_preempted = 0
    for number in range(400):
        if number < 120 and rng.random() < 0.6:
            name = f"{rng.choice('abcd--')}{number}"
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
            samples = [
                Sequence(
                    f"{name}.{i}", list(prompt), rng.randrange(1, 12), tenant=name[0] if seed % 2 else ""
                )
                for i in range(rng.choice((1, 1, 1, 3)))
            ]
            samples[0].parallel_samples = samples[1:]
            everyone += samples
            scheduler.add(samples[0])
        if everyone and rng.random() < 0.1:
            scheduler.abort(rng.choice(everyone))
        planned = scheduler.plan()
        if planned is None:
            assert not scheduler.stuck()
            continue
        num_preempted += len(planned.preempted)
        if everyone and rng.random() < 0.1:
            scheduler.abort(rng.choice(everyone))
        results = [SampleResult(rng.randrange(3), finished=rng.random() < 0.1) for _ in planned.sampled()]
        scheduler.commit(planned, results)
        scheduler.blocks.check()
        running = [each for each in everyone if each.status is Status.RUNNING]
        assert +slots.holders == Counter(map(key_of, running))
        assert len(slots.keys) <= 2
    assert all(each.status is Status.FINISHED for each in everyone), "a sequence waits for ever"
    assert num_preempted, "pages were never short"
    assert not +slots.holders
    assert scheduler.blocks.counts.held == 0


class Media(Resource):
    """A resource that is missing for IDs that start with ``m``, until ``come`` is set."""

    def __init__(self) -> None:
        self.has_come = False
        self.waiting: list[Sequence] = []

    @property
    def is_pending(self) -> bool:
        return bool(self.waiting)

    def hold(self, sequence: Sequence) -> Admission:
        if self.has_come or key_of(sequence) != "m":
            return Admission.ADMITTED
        self.waiting.append(sequence)
        return Admission.NO_MEDIA

    def come(self, scheduler: Scheduler) -> None:
        self.has_come = True
        while self.waiting:
            scheduler.retry(self.waiting.pop(0))


@every_queue
def test_sequences_without_media_hold_up_nothing(queue: str) -> None:
    media = Media()
    blocks = BlockManager(64, 4)
    scheduler = Scheduler(blocks, Limits(16, 4), waiting=QUEUES[queue](blocks), resources=(media,))
    first = [Sequence(f"m{n}", [5, n], 2, tenant="late", priority=-1) for n in range(3)]
    for sequence in first:
        scheduler.add(sequence)
    assert scheduler.plan() is None
    assert all(each.status is Status.WAITING_FOR_MEDIA and each.table is None for each in first)
    assert scheduler.has_work
    assert scheduler.is_blocked
    assert not scheduler.stuck()
    assert (scheduler.num_waiting, scheduler.num_running) == (3, 0)
    others = [Sequence(f"-{n}", [6, n], 3, tenant=f"tenant {n % 2}") for n in range(600)]
    for sequence in others:
        scheduler.add(sequence)
    for _ in range(10):
        planned = step(scheduler)
        assert planned is not None
        assert len(planned.work) == 4, "no slot is kept, and none is taken back"
    assert scheduler.num_preemptions == 0
    assert sum(each.status is not Status.WAITING for each in others) >= 12, "many passed"
    scheduler.abort(first[1])
    assert status_of(first[1]) is Status.FINISHED
    media.waiting.remove(first[1])
    media.come(scheduler)
    step(scheduler)
    while status_of(first[0]) is not Status.FINISHED or status_of(first[2]) is not Status.FINISHED:
        step(scheduler)
        assert sum(each.status is Status.WAITING for each in others) > 500, "it has its place again"
    for sequence in others:
        scheduler.abort(sequence)
    assert blocks.counts.held == 0
    assert not scheduler.has_work
