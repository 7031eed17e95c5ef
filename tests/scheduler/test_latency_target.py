from __future__ import annotations

import random
import statistics
from typing import Literal

import pytest

from octavo.block_manager import BlockManager
from octavo.scheduler import LatencyGoal, Limits, SampleResult, Scheduler, Sequence
from octavo.scheduler.latency_target import MAX_HEADROOM, MIN_CHUNK, MIN_HEADROOM, MIN_RUNNING, LatencyTarget
from octavo.scheduler.step_cost import StepCost, shape_of, with_chunk
from octavo.scheduler.types import ScheduledChunk, StepShape
from step_times import machine

PAGE_SIZE = 16


def make(target_itl: float | Literal["auto"] | None) -> Scheduler:
    limits = Limits(max_step_tokens=512, max_running=16, target_itl=target_itl)
    return Scheduler(BlockManager(2000, PAGE_SIZE, max_chunk=512), limits)


def advance(scheduler: Scheduler, speed: float = 1.0) -> tuple[float, int, int]:
    step = scheduler.plan()
    assert step is not None
    shape = shape_of(step.work)
    seconds = machine(shape, speed)
    scheduler.commit(step, [SampleResult(7)] * len(step.sampled()))
    scheduler.observe(step, seconds)
    return seconds, shape.num_decodes, shape.num_chunk_tokens


def stream_with_arrivals(
    target_itl: float | Literal["auto"] | None, *, speeds: list[float]
) -> tuple[list[float], float, int]:
    scheduler, rng = make(target_itl), random.Random(1)
    for index in range(8):
        scheduler.add(Sequence(f"s{index}", [rng.randrange(1000) for _ in range(100)], 10_000))
    gaps, total, tokens, number = [], 0.0, 0, 0
    for speed in speeds:
        if scheduler.num_running + scheduler.num_waiting < 9:
            prompt = [rng.randrange(1000) for _ in range(2000)]
            scheduler.add(Sequence(f"p{number}", prompt, 1))
            number += 1
        seconds, decodes, chunk = advance(scheduler, speed)
        total, tokens = total + seconds, tokens + decodes + chunk
        if decodes >= 8:
            gaps.append(seconds)
    return gaps, total, tokens


def test_no_gap_is_longer_than_the_target_once_steps_are_known() -> None:
    gaps, _, _ = stream_with_arrivals(0.150, speeds=[1.0] * 400)
    assert max(gaps[20:]) <= 0.150
    without, _, _ = stream_with_arrivals(None, speeds=[1.0] * 400)
    assert max(without) > 0.7


@pytest.mark.parametrize("server", [None, 0.3, "auto"])
def test_the_tightest_target_of_decoding_sequences_counts(server: float | Literal["auto"] | None) -> None:
    scheduler, rng = make(server), random.Random(1)
    for number, own in enumerate((None, 0.110, 0.5)):
        scheduler.add(
            Sequence(f"s{number}", [rng.randrange(99) for _ in range(16)], 2000, latency=LatencyGoal(own))
        )
    for _ in range(30):
        advance(scheduler)
    seconds = []
    for number in range(30):
        scheduler.add(Sequence(f"p{number}", [rng.randrange(99) for _ in range(600)], 1))
        while scheduler.num_waiting or scheduler.num_running > 3:
            step = scheduler.plan()
            assert step is not None
            took = machine(shape_of(step.work))
            scheduler.commit(step, [SampleResult(7) for _ in step.sampled()])
            scheduler.observe(step, took)
            seconds.append(took)
    assert max(seconds[20:]) <= 0.110
    assert server == "auto" or max(seconds[20:]) > 0.06, "and no less than that"


def test_auto_keeps_gaps_within_three_times_a_decode_step() -> None:
    alone = machine(StepShape(8, 0, 8 * 300, 0))
    gaps, _, _ = stream_with_arrivals("auto", speeds=[1.0] * 400)
    assert alone > 0.025 / 3
    assert max(gaps[20:]) <= 3 * alone
    assert max(gaps[20:]) > 1.5 * alone


def test_auto_gives_fast_models_their_chunks_and_slow_ones_room() -> None:
    fast, slow = LatencyTarget("auto"), LatencyTarget("auto")
    shape, full = StepShape(8, 0, 1000, 0), with_chunk(StepShape(8, 0, 1000, 0), 0, 64)
    for _ in range(50):
        for target, scale in ((fast, 0.001), (slow, 0.3)):
            target.observe(shape, scale)
            target.observe(full, scale * 1.1)
    work = [ScheduledChunk(Sequence(f"s{i}", [1] * 125, 10), 124, 125, True, ()) for i in range(8)]
    most_fast, most_slow = (target.limit(shape_of(work)).max_chunk(0, 2048) for target in (fast, slow))  # type: ignore[union-attr]
    assert most_fast == 2048
    assert MIN_CHUNK < most_slow < 200


def test_a_target_that_cannot_be_met_starves_no_prompt() -> None:
    scheduler = make(0.001)
    for index in range(8):
        scheduler.add(Sequence(f"s{index}", [index] * 40, 10_000))
    for _ in range(20):
        advance(scheduler)
    prompt = Sequence("long", list(range(500)), 1)
    scheduler.add(prompt)
    for _ in range(100):
        if prompt.status.name == "FINISHED":
            break
        advance(scheduler)
    assert prompt.status.name == "FINISHED"


def teach(scheduler: Scheduler, num_steps: int) -> None:
    for _ in range(num_steps):
        advance(scheduler)


def test_prompts_of_one_step_share_its_time() -> None:
    limits = Limits(max_step_tokens=512, max_running=16, target_itl=0.150)
    scheduler = Scheduler(BlockManager(2000, PAGE_SIZE, max_chunk=512), limits)
    rng = random.Random(2)
    for index in range(MIN_RUNNING):
        scheduler.add(Sequence(f"s{index}", [rng.randrange(1000) for _ in range(100)], 500))
    scheduler.add(Sequence("teaches", [rng.randrange(1000) for _ in range(500)], 1))
    teach(scheduler, 60)
    for index in range(3):
        scheduler.add(Sequence(f"p{index}", [rng.randrange(1000) for _ in range(60)], 1))
    step = scheduler.plan()
    assert step is not None
    assert len(step.work) == MIN_RUNNING + 2, "the third is not let in for a token"
    chunks = [item.stop - item.start for item in step.work if item.stop - item.start > 1]
    assert chunks[0] == 60
    assert 0 < chunks[1] < 60
    assert machine(shape_of(step.work)) <= 0.150


@pytest.mark.parametrize("seed", range(3))
def test_as_many_decodes_in_every_step_leave_the_prediction_right(seed: int) -> None:
    def seconds(shape: StepShape) -> float:
        tokens = shape.num_chunk_tokens
        return 0.028 + 0.00125 * min(tokens, 64) + 0.0006 * max(0, tokens - 64) + 1e-7 * shape.chunk_positions

    rng, target = random.Random(seed), LatencyTarget(0.15)
    for _ in range(4):
        shape = with_chunk(StepShape(0, 0, 0, 0), 0, 512)
        target.observe(shape, seconds(shape) * rng.uniform(0.9, 1.1))
    taken, predicted = [], []
    for step in range(600):
        start, decodes = step * 37 % 2000, StepShape(8, 0, 800 + 8 * step, 0)
        time = target.limit(decodes)
        assert time is not None
        shape = with_chunk(decodes, start, time.max_chunk(start, 512))
        taken.append(seconds(shape))
        predicted.append(target.predict(shape))
        target.observe(shape, taken[-1] * rng.uniform(0.85, 1.15))
    assert statistics.median(taken[200:]) > 0.8 * 0.15 * target.headroom, "the time that there is, is used"
    assert max(p / t for p, t in zip(predicted[200:], taken[200:], strict=True)) < 1.6


TILE = 16


def in_tiles(shape: StepShape) -> float:
    rows = shape.num_decodes + shape.num_chunk_tokens
    return 0.02 + 0.028 * -(-rows // TILE) + 1e-8 * shape.chunk_positions


def cut_in_tiles(row_tile: int, noise: float = 0.0) -> tuple[list[StepShape], list[float], LatencyTarget]:
    target, rng = LatencyTarget(0.15, StepCost(row_tile)), random.Random(4)
    shapes, taken = [], []
    for step in range(500):
        decodes = StepShape(8, 0, 2000, 0)
        time = target.limit(decodes)
        assert time is not None
        start = step * 37 % 2000
        shape = with_chunk(decodes, start, time.max_chunk(start, 512)) if step % 5 else decodes
        seconds = in_tiles(shape) * rng.uniform(1 - noise, 1 + noise)
        target.observe(shape, seconds)
        if step > 100 and shape.num_chunk_tokens:
            shapes.append(shape)
            taken.append(seconds)
    return shapes, taken, target


def test_chunks_that_are_cut_fill_the_tiles_of_their_kernels() -> None:
    shapes, taken, _ = cut_in_tiles(TILE)
    full = sum((shape.num_decodes + shape.num_chunk_tokens) % TILE == 0 for shape in shapes)
    assert full > 0.9 * len(shapes)
    assert max(taken) <= 0.15
    loose, loose_taken, _ = cut_in_tiles(1)
    rate, loose_rate = (
        sum(each.num_chunk_tokens for each in run) / sum(seconds)
        for run, seconds in ((shapes, taken), (loose, loose_taken))
    )
    assert rate > 1.03 * loose_rate, "what is gained"


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_nine_of_ten_steps_are_within_the_target_however_they_vary(noise: float) -> None:
    _, taken, _ = cut_in_tiles(TILE, noise)
    assert sum(seconds <= 0.15 for seconds in taken) >= 0.9 * len(taken)


def test_headroom_follows_the_errors_of_predictions_within_bounds() -> None:
    shape = StepShape(8, 64, 1000, 64 * 500)
    first = LatencyTarget(0.15).headroom
    calm, wild, stalled = LatencyTarget(0.15), LatencyTarget(0.15), LatencyTarget(0.15)
    for step in range(200):
        calm.observe(shape, 0.1)
        wild.observe(shape, 0.1 * (1 + step % 2 * 9))
        stalled.observe(shape, 0.1 if step < 199 else 60.0)
    assert calm.headroom == MAX_HEADROOM
    assert wild.headroom == MIN_HEADROOM
    assert MIN_HEADROOM < first < MAX_HEADROOM
    assert stalled.headroom > 0.93 * MAX_HEADROOM, "one stall says little of the others"
