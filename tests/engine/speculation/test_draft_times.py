from __future__ import annotations

import random

import pytest

from octavo.engine.speculation.draft_times import UNKNOWN_COST, DraftTimes, draft_rows
from octavo.scheduler import ScheduledChunk, SchedulerOutput
from octavo.scheduler import Sequence as Served
from octavo.scheduler.drafts import NUM_ROWS

# Seconds of a step by number of drafts.
STEPS = {0: 0.030, 1: 0.043, 2: 0.048, 3: 0.0485, 4: 0.056, 6: 0.062, 8: 0.069}


def taught(*, noise: float, num_sequences: int = 1) -> DraftTimes:
    rng = random.Random(1)
    times = DraftTimes()
    for _ in range(40):
        for count, seconds in STEPS.items():
            times.observe(num_sequences, count, seconds * rng.lognormvariate(0.0, noise))
    return times


def up_to_eight(times: DraftTimes) -> dict[int, float]:
    return {count: ratio for count, ratio in times.ratios(1) if count <= 8}


def test_before_any_step_drafts_cost_less_with_more_sequences() -> None:
    times = DraftTimes()
    assert times.ratios(1)[:2] == ((1, 1 + UNKNOWN_COST), (2, 1 + 2 * UNKNOWN_COST))
    assert times.cost(8) == UNKNOWN_COST / 8


@pytest.mark.parametrize(("noise", "error"), [(0.0, 0.03), (0.1, 0.08), (0.5, 0.25)])
def test_ratios_of_each_number_of_drafts_are_learned(noise: float, error: float) -> None:
    ratios = up_to_eight(taught(noise=noise))
    assert ratios == pytest.approx({n: t / 0.030 for n, t in STEPS.items() if n}, rel=error)


def test_a_step_that_took_a_hundred_times_as_long_changes_little() -> None:
    times = taught(noise=0.0)
    before = up_to_eight(times)
    times.observe(1, 4, 5.6)
    times.observe(1, 0, 3.0)
    assert up_to_eight(times) == pytest.approx(before, rel=0.06)


def test_the_machine_may_become_slower() -> None:
    times = taught(noise=0.0)
    for _ in range(100):
        for count, seconds in STEPS.items():
            times.observe(1, count, 3 * seconds)
    assert up_to_eight(times) == pytest.approx({n: t / 0.030 for n, t in STEPS.items() if n}, rel=0.08)


def test_the_first_step_of_a_number_of_rows_is_not_counted() -> None:
    """The first step is captured, which takes as long as twenty steps of a small model."""
    times = DraftTimes()
    for count, seconds in STEPS.items():
        times.observe(1, count, seconds if not count else 20 * STEPS[0])
    assert times.cost(1) == UNKNOWN_COST
    assert times.ratios(1) == DraftTimes().ratios(1)
    for _ in range(10):
        for count, seconds in STEPS.items():
            times.observe(1, count, seconds)
    expected = {n: t / 0.030 for n, t in STEPS.items() if n}
    assert up_to_eight(times) == pytest.approx(expected, rel=0.06)


def test_more_drafts_never_cost_less_and_unknown_ones_lie_on_the_line() -> None:
    times = taught(noise=0.5)
    ratios = times.ratios(1)
    assert [count for count, _ in ratios] == list(NUM_ROWS)
    values = [ratio for _, ratio in ratios]
    assert values == sorted(values)
    assert values[0] >= 1.0
    assert dict(ratios)[128] == pytest.approx(1 + 128 * times.cost(1))


def test_times_of_other_batch_sizes_are_scaled() -> None:
    times = taught(noise=0.0, num_sequences=8)
    assert times.cost(4) == pytest.approx(2 * times.cost(8))
    assert times.cost(32) == pytest.approx(times.cost(8) / 4)


def test_drafts_before_any_plain_step_are_not_learned_from() -> None:
    times = DraftTimes()
    times.observe(2, 4, 0.5)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        times.observe(2, 0, seconds)
    times.observe(0, 0, 0.5)
    assert times.cost(2) == UNKNOWN_COST / 2


def test_steps_that_compute_a_prompt_are_not_compared() -> None:
    one, other = (Served(name, [1] * 9, 9) for name in "ab")
    decode = ScheduledChunk(one, 8, 9, True, drafts=(1, 2))
    assert draft_rows(SchedulerOutput((decode, ScheduledChunk(other, 8, 9, True)))) == (2, 2)
    assert draft_rows(SchedulerOutput((decode, ScheduledChunk(other, 0, 8, False)))) is None


def test_ratios_are_made_anew_only_when_something_was_learned() -> None:
    times = taught(noise=0.1)
    before = times.ratios(1)
    times.observe(1, 0, 0.031)
    assert times.ratios(1) is before, "a step without drafts says nothing about them"
    times.observe(1, 4, 0.09)
    assert dict(times.ratios(1))[4] > dict(before)[4]
    of_three = times.ratios(3)
    times.observe(2, 0, 0.03)
    for _ in range(2):
        times.observe(2, 8, 0.30)
    assert times.ratios(3) != of_three, "what is known of the nearest number of sequences has changed"
