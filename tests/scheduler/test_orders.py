from __future__ import annotations

import pytest

from octavo.block_manager import BlockManager
from octavo.scheduler import Sequence
from octavo.scheduler.preemption import has_headroom
from octavo.scheduler.types import ScheduledChunk
from octavo.scheduler.waiting import WaitingQueue, cached_tokens
from octavo.scheduler.waiting.line import MAX_OVERTAKEN, Line
from octavo.scheduler.waiting.queue import LOOK_AHEAD, SHORT_STEPS
from waiting_queues import QUEUES

PAGE_SIZE = 4


def sequence(name: str, **options: object) -> Sequence:
    return Sequence(name, [1, 2, 3], 20, **options)  # type: ignore[arg-type]


def test_preempted_sequences_overtake_none_on_return() -> None:
    line, older, other = Line(), sequence("older"), sequence("other")
    line.append(older)
    line.append(other)
    for _ in range(MAX_OVERTAKEN):
        line.put_back(back := sequence("back"))
        line.remove(back)
    assert rank(line, older) == rank(line, other), "it is not due"
    for _ in range(MAX_OVERTAKEN):
        line.append(young := sequence("young"))
        line.remove(young)
    assert rank(line, older) < rank(line, other), "now it is"


def rank(line: Line, sequence: Sequence) -> int:
    return next(each for each, _, ranked in line.ranks(9, frozenset(), lambda _: 0) if ranked is sequence)


def let_in_as(number: int, name: str = "") -> Sequence:
    one = sequence(name or str(number))
    one.history.num_admitted_before = number
    return one


@pytest.mark.parametrize("kind", QUEUES)
def test_preempted_sequences_return_in_order_of_admission(kind: str) -> None:
    queue = QUEUES[kind](BlockManager(8, PAGE_SIZE))
    never_ran = sequence("never ran")
    queue.append(never_ran)
    first, second, third = (let_in_as(number) for number in range(3))
    sample = let_in_as(1, "of the second")
    for each in (second, third, first, sample):
        queue.put_back(each)
    queue.set_late({never_ran})
    assert list(queue.admission_order()) == [first, sample, second, third, never_ran]


@pytest.mark.parametrize("kind", QUEUES)
def test_preempted_sequences_share_one_overtaking_limit(kind: str) -> None:
    queue = QUEUES[kind](BlockManager(8, PAGE_SIZE))
    first, second, third = (let_in_as(number) for number in range(3))
    queue.put_back(first)
    queue.put_back(second)

    def passes(number: int) -> None:
        for _ in range(number):
            other = sequence("other")
            queue.append(other)
            assert queue.may_overtake(first, other)
            queue.remove(other)

    passes(MAX_OVERTAKEN // 2)
    queue.remove(first)
    queue.put_back(third)
    passes(MAX_OVERTAKEN // 2)
    other = sequence("other")
    queue.append(other)
    assert not queue.may_overtake(second, other)
    queue.remove(second)
    assert not queue.may_overtake(third, other)
    queue.remove(third)
    fresh = let_in_as(3)
    queue.put_back(fresh)
    assert queue.may_overtake(fresh, other), "they were back in the meantime"


def test_a_long_prompt_does_not_delay_higher_priorities() -> None:
    queue, urgent, later = WaitingQueue(), sequence("urgent", priority=-1), sequence("later", priority=1)
    assert queue.delays(urgent, later)
    assert not queue.delays(later, urgent)


def test_a_returning_tenant_keeps_its_service_counter() -> None:
    queue = WaitingQueue(BlockManager(8, PAGE_SIZE), {}, quantum=10.0)
    first, second = sequence("first", tenant="a"), sequence("second", tenant="a")
    queue.append(first)
    queue.on_planned(ScheduledChunk(first, 0, 3, True))
    queue.remove(first)
    queue.append(second)
    assert queue.service_of("a") == 3.0


def test_tokens_that_drafts_gave_are_charged_each() -> None:
    queue, one = WaitingQueue(weights={}), sequence("one", tenant="a")
    queue.append(one)
    work = [ScheduledChunk(one, 0, 3, True)]
    queue.on_planned(work[0])
    one.tokens.append(4)
    queue.on_computed(work)
    assert queue.service_of("a") == 3 + 2
    one.tokens += [5, 6, 7]
    queue.on_computed([ScheduledChunk(one, 3, 4, True, (), (5, 6))])
    assert queue.service_of("a") == 3 + 2 + 3 * 2


def test_one_step_in_several_may_end_early() -> None:
    queue, one, other = WaitingQueue(weights={}), sequence("one", tenant="a"), sequence("other", tenant="b")
    work = [ScheduledChunk(other, 0, 3, True)]
    for _ in range(3):
        assert queue.ends_step(one, work)
        for _ in range(SHORT_STEPS):
            queue.on_computed(work)
            assert not queue.ends_step(one, work)
        queue.on_computed(work)


def test_a_tenant_with_many_waiting_offers_few_of_them_in_a_step() -> None:
    queue = WaitingQueue(weights={})
    for number in range(3 * LOOK_AHEAD):
        queue.append(sequence(str(number), tenant="a"))
    queue.append(sequence("last", tenant="b"))
    assert sorted(each.tenant for each in queue.admission_order()) == ["a"] * LOOK_AHEAD + ["b"]


def test_a_prompt_that_is_to_be_computed_has_nothing_cached() -> None:
    blocks = BlockManager(8, PAGE_SIZE)
    tokens = list(range(9))
    table = blocks.open(tokens)
    assert blocks.reserve(table, 9)
    blocks.commit(table, tokens, 9)
    assert cached_tokens(Sequence("finds", tokens, 1), blocks) == 8
    assert cached_tokens(Sequence("computes", tokens, 1, skip_prefix_cache=True), blocks) == 0


def test_samples_that_wait_for_a_prompt_need_room_to_grow() -> None:
    blocks = BlockManager(12, PAGE_SIZE)
    running, back = Sequence("running", [1] * 3, 8), Sequence("back", [2] * 3, 20)
    running.table = blocks.open(running.tokens)
    assert blocks.reserve(running.table, 4)
    back.table = blocks.open(back.tokens)
    back.history.num_preempted = 3
    assert has_headroom(back, [running], blocks)
    back.parallel_samples = [Sequence("parallel sample", [2] * 3, 20)]
    assert not has_headroom(back, [running], blocks)
