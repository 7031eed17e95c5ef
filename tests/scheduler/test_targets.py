from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest

from octavo.block_manager import BlockManager
from octavo.scheduler import LatencyGoal, Limits, SampleResult, Scheduler, Sequence
from octavo.scheduler.latency_target import MIN_RUNNING, StepTime
from octavo.scheduler.step_cost import shape_of
from octavo.scheduler.types import StepShape
from step_times import machine
from steps import advance

PAGE_SIZE = 16


def crowd(
    target_itl: float | Literal["auto"] | None, own: float | None = None
) -> tuple[list[float], list[int]]:
    limits = Limits(max_step_tokens=512, max_running=64, target_itl=target_itl)
    scheduler = Scheduler(BlockManager(2000, PAGE_SIZE, max_chunk=512), limits)
    head = [5] * 1000
    scheduler.add(Sequence("first", list(head), 2))
    seconds: list[float] = []
    running: list[int] = []
    for number in range(10_000):
        if number == 3:
            for index in range(64):
                scheduler.add(Sequence(f"s{index}", [*head, index], 60, latency=LatencyGoal(own)))
        if (step := scheduler.plan()) is None:
            return seconds, running
        shape = shape_of(step.work)
        seconds.append(machine(shape) + 3e-6 * (shape.num_positions + shape.chunk_positions / 100))
        running.append(scheduler.num_running)
        scheduler.commit(step, [SampleResult(7)] * len(step.sampled()))
        scheduler.observe(step, seconds[-1])
    raise AssertionError("somebody starves")


@pytest.mark.parametrize(("server", "own"), [(0.1, None), (None, 0.1), ("auto", 0.1)])
def test_no_more_run_than_decode_within_the_target(
    server: float | Literal["auto"] | None, own: float | None
) -> None:
    seconds, running = crowd(server, own)
    assert max(seconds[10:]) <= 0.1
    assert max(running[20:]) > 10, "and no fewer either"
    without, _ = crowd(None)
    assert max(without[10:]) > 0.2


def test_only_long_sequences_wait_for_time() -> None:
    limits = Limits(max_step_tokens=512, max_running=64, target_itl=0.05)
    scheduler = Scheduler(BlockManager(2000, PAGE_SIZE, max_chunk=512), limits)
    head = [5] * 12_000

    def advance_with_positions() -> None:
        step = scheduler.plan()
        assert step is not None
        shape = shape_of(step.work)
        scheduler.commit(step, [SampleResult(7)] * len(step.sampled()))
        scheduler.observe(step, machine(shape) + 3e-6 * shape.num_positions)

    scheduler.add(Sequence("first", list(head), 40))
    while scheduler.has_work:
        advance_with_positions()
    for index in range(5):
        scheduler.add(Sequence(f"s{index}", [index], 100))
    for _ in range(10):
        advance_with_positions()
    long, short = Sequence("long", [*head, 1], 2), Sequence("short", [1, 2], 2)
    scheduler.add(long)
    advance_with_positions()
    assert long.status.name == "WAITING"
    scheduler.abort(long)
    scheduler.add(short)
    advance_with_positions()
    assert short.status.name == "RUNNING"


def test_a_few_sequences_run_under_any_target() -> None:
    seconds, running = crowd(0.029)
    assert max(running[20:]) == MIN_RUNNING
    assert max(seconds[10:]) > 0.029 > machine(StepShape(1, 0, 1000, 0)) + 0.003


def advance_by_rows(scheduler: Scheduler) -> None:
    step = advance(scheduler)
    scheduler.observe(step, 0.01 + 0.004 * len(step.work) + 1e-6 * step.num_tokens)


def busy() -> Scheduler:
    limits = Limits(max_step_tokens=512, max_running=64, target_itl=0.04)
    scheduler = Scheduler(BlockManager(2000, PAGE_SIZE, max_chunk=512), limits)

    for index in range(MIN_RUNNING - 1):
        scheduler.add(Sequence(f"s{index}", [index, 1], 500))
        advance_by_rows(scheduler)
    for _ in range(40):
        advance_by_rows(scheduler)
    scheduler.add(Sequence("own", [9], 500))
    for _ in range(3):
        advance_by_rows(scheduler)
    for index in range(2):
        scheduler.add(Sequence(f"waits {index}", [7, index], 2))
        advance_by_rows(scheduler)
    assert scheduler.num_running == MIN_RUNNING
    assert scheduler.num_waiting == 2
    return scheduler


def test_steps_are_planned_ahead_while_no_sequence_has_time() -> None:
    scheduler = busy()
    assert scheduler.plan() is not None
    ahead = scheduler.plan_ahead()
    assert ahead is not None
    assert len(ahead.work) == MIN_RUNNING


def test_waiting_samples_count_when_their_prompt_is_admitted() -> None:
    limits = Limits(max_step_tokens=512, max_running=64, target_itl=0.060)
    scheduler = Scheduler(BlockManager(2000, PAGE_SIZE, max_chunk=512), limits)

    for index in range(MIN_RUNNING):
        scheduler.add(Sequence(f"s{index}", [index, 1], 500))
        advance_by_rows(scheduler)
    for _ in range(40):
        advance_by_rows(scheduler)
    many, one = Sequence("many", [8, 1], 100), Sequence("one", [9, 1], 100)
    many.parallel_samples = [Sequence(f"many {index}", [8, 1], 100) for index in range(5)]
    scheduler.add(many)
    advance_by_rows(scheduler)
    assert many.status.name == "WAITING"
    scheduler.abort(many)
    for parallel_sample in list(many.parallel_samples):
        scheduler.abort(parallel_sample)
    while scheduler.num_waiting:
        scheduler.abort(next(iter(scheduler._queues.waiting)))
    scheduler.add(one)
    advance_by_rows(scheduler)
    assert one.status.name == "RUNNING"


def test_drafts_fit_into_the_time_of_a_step() -> None:
    cost: Any = SimpleNamespace(predict=lambda shape: 0.01 * shape.num_decodes)
    time = StepTime(cost, StepShape(1, 0, 9, 0), 0.055, is_calibrated=True)
    assert [time.max_drafts(9, wanted) for wanted in (0, 3, 4, 9)] == [0, 3, 4, 4]
