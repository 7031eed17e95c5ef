"""Steps of a scheduler without a model: each sample gets the same token."""

from __future__ import annotations

from octavo.scheduler import SampleResult, Scheduler, SchedulerOutput


def plan(scheduler: Scheduler) -> SchedulerOutput:
    step = scheduler.plan()
    assert step is not None
    return step


def commit(scheduler: Scheduler, step: SchedulerOutput, token: int = 7) -> None:
    scheduler.commit(step, [SampleResult(token)] * len(step.sampled()))
    scheduler.blocks.check()


def advance(scheduler: Scheduler, token: int = 7) -> SchedulerOutput:
    step = plan(scheduler)
    commit(scheduler, step, token)
    return step


def names(step: SchedulerOutput) -> list[str]:
    return [work.sequence.sequence_id for work in step.work]
