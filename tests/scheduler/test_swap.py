from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_harness import Harness
from fakes import small_config
from octavo.block_manager import BlockManager, FullAttention, KVGroupSpec, RecurrentState, SlidingWindow
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.request import Request
from octavo.engine.kv_store.prefetch import Rate
from octavo.scheduler import KVConnector, Limits, SampleResult, Scheduler, SchedulerOutput, Sequence, Status
from oracle import alone
from swapping import wait_for_disk

MIB = 1024**2
MANY = SamplingParams(max_tokens=70, ignore_eos=True)
CROWD = small_config(num_pages=36, async_steps=False)
"""Three sequences of 20 + 70 tokens need 69 pages of 4 tokens."""


def prompt(number: int, length: int = 20) -> list[int]:
    return [number] * length


class Watched(Harness):
    def __init__(self, config: EngineConfig, **options: object) -> None:
        super().__init__(config, **options)
        self.steps: list[SchedulerOutput] = []
        plan = self.core._scheduler.plan

        def noted(now: float | None = None, *, spent_s: float = 0.0) -> SchedulerOutput | None:
            step = plan(now, spent_s=spent_s)
            if step is not None:
                self.steps.append(step)
            return step

        self.core._scheduler.plan = noted  # type: ignore[method-assign]

    def run_to_the_end(self) -> None:
        end = time.monotonic() + 60
        scheduler = self.core._scheduler
        while scheduler.num_running or scheduler.num_waiting:
            assert time.monotonic() < end, "the engine gets nowhere"
            if self.core.has_work:
                self.step()
            else:
                time.sleep(0.001)


def tokens_computed(harness: Watched) -> int:
    return sum(step.num_tokens for step in harness.steps)


def crowd(config: EngineConfig, *, count: int = 3) -> tuple[Watched, list[Request]]:
    harness = Watched(config)
    requests = [harness.add(prompt(number), MANY) for number in range(count)]
    harness.run_to_the_end()
    for number, request in enumerate(requests):
        assert harness.result(request) == alone(prompt(number), MANY)
    assert harness.core._scheduler.num_preemptions > 0
    harness.assert_idle()
    return harness, requests


def test_a_preempted_sequence_gets_its_pages_back() -> None:
    computed_again, _ = crowd(CROWD)
    brought_back, _ = crowd(replace(CROWD, swap_memory=MIB))
    counts = brought_back.core.gauges.swap
    assert counts is not None
    assert counts.num_out >= counts.num_in > 0
    assert counts.num_bytes <= MIB
    saved = tokens_computed(computed_again) - tokens_computed(brought_back)
    assert saved == pytest.approx(counts.num_in * CROWD.page_size, abs=CROWD.page_size)
    assert tokens_computed(brought_back) < 3 * 90 + 3 * CROWD.page_size, "but for pages that were not full"


def test_the_folder_of_cached_pages_serves_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_disk(monkeypatch)
    computed_again, _ = crowd(CROWD)
    brought_back, _ = crowd(replace(CROWD, cache_dir=tmp_path))
    counts = brought_back.core._gauge_source.measure().store
    assert counts is not None
    assert counts.loaded > 0
    assert tokens_computed(brought_back) < tokens_computed(computed_again)
    brought_back.core.close()


def test_pages_are_computed_if_loading_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rate, "seconds", lambda self, num_bytes: 1e9 * num_bytes)  # noqa: ARG005
    harness, _ = crowd(replace(CROWD, swap_memory=MIB))
    counts = harness.core.gauges.swap
    assert counts is not None
    assert counts.num_in == 0


def on_the_way_back() -> tuple[Watched, Request]:
    harness = Watched(replace(CROWD, swap_memory=MIB))
    requests = [harness.add(prompt(number), MANY) for number in range(3)]
    while not harness.core._scheduler._queues.loading:
        harness.step()
    (sequence,) = harness.core._scheduler._queues.loading
    assert sequence.status is Status.WAITING_FOR_PAGES
    return harness, next(each for each in requests if each.samples[0].sequence is sequence)


def test_space_of_a_loading_sequence_is_reserved() -> None:
    harness, back = on_the_way_back()
    scheduler = harness.core._scheduler
    poll, scheduler._connector.poll = scheduler._connector.poll, lambda: ()  # type: ignore[method-assign]
    other = harness.add(prompt(9, 4), replace(MANY, max_tokens=2))
    urgent = harness.add(prompt(8, 4), replace(MANY, max_tokens=2), priority=-1)
    for _ in range(4):
        harness.step()
    assert harness.result(urgent) == alone(prompt(8, 4), replace(MANY, max_tokens=2))
    assert other.samples[0].sequence.status is Status.WAITING
    scheduler._connector.poll = poll  # type: ignore[method-assign]
    harness.step()
    assert back.samples[0].sequence.status is Status.RUNNING
    harness.run_to_the_end()


def test_no_step_is_planned_while_all_wait_for_a_loading_one() -> None:
    harness, back = on_the_way_back()
    scheduler = harness.core._scheduler
    for request in list(harness.deltas):
        if request is not back:
            harness.core.abort(request)
    harness.add(prompt(9, 4), MANY)
    scheduler._connector._jobs, kept = {}, scheduler._connector._jobs  # type: ignore[attr-defined]
    assert not scheduler.has_work
    assert scheduler.plan() is None
    scheduler._connector._jobs = kept  # type: ignore[attr-defined]
    assert scheduler.has_work
    harness.run_to_the_end()
    assert harness.result(back) == alone(back.samples[0].sequence.tokens[:20], MANY)


class Promises(KVConnector):
    def __init__(self) -> None:
        self.num_asked = 0
        self._asking: list[Sequence] = []

    @property
    def has_updates(self) -> bool:
        return bool(self._asking)

    def start_load(self, sequence: Sequence, /, *, token_s: float | None = None) -> bool:
        if token_s is None:
            return False
        self.num_asked += 1
        self._asking.append(sequence)
        return True

    def poll(self) -> list[Sequence]:
        asking, self._asking = self._asking, []
        return asking


def test_the_store_is_asked_once_per_preemption() -> None:
    connector = Promises()
    scheduler = Scheduler(BlockManager(36, 4), Limits(32, 8), connector)
    everyone = [Sequence(str(number), prompt(number), 70) for number in range(3)]
    for sequence in everyone:
        scheduler.add(sequence)
    for _ in range(1000):
        if not scheduler.has_work:
            break
        step = scheduler.plan()
        if step is not None:
            scheduler.commit(step, [SampleResult(7)] * len(step.sampled()))
            scheduler.observe(step, 0.01)
    assert all(sequence.status is Status.FINISHED for sequence in everyone)
    assert connector.num_asked == scheduler.num_preemptions > 0


def test_without_a_prefix_cache_it_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="swap_memory must be left out without prefix_cache"):
        small_config(swap_memory=MIB, prefix_cache=False)


def test_a_store_that_was_slow_once_is_tried_again() -> None:
    rate = Rate()
    assert rate.is_within(10**9, 1e-9), "nobody knows yet"
    rate.observe(100, 1.0)
    assert rate.seconds(200) == pytest.approx(2.0)
    assert rate.is_within(200, 2.1)
    tries = 0
    while not rate.is_within(200, 0.5):
        tries += 1
    assert 5 < tries < 20


jobs = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(1, 40)), min_size=2, max_size=7)
GROUPS: dict[str, tuple[KVGroupSpec, ...]] = {
    "one": (),
    "windows": (FullAttention(num_pages=24), SlidingWindow(num_pages=26, window=9)),
}


STATES: dict[str, RecurrentState | None] = {
    "none": None,
    "any slot": RecurrentState(num_slots=9, slot_bytes=16),
    "every page": RecurrentState(num_slots=12, slot_bytes=16, every_page=True),
}


@settings(max_examples=60)
@given(
    jobs=jobs,
    spare=st.integers(0, 10),
    swap_memory=st.sampled_from([0, 300, 3000, MIB]),
    groups=st.sampled_from(list(GROUPS)),
    states=st.sampled_from(list(STATES)),
    cancelled=st.dictionaries(st.integers(0, 6), st.integers(1, 60), max_size=3),
    overlaps=st.booleans(),
)
def test_outputs_equal_those_of_requests_served_alone(
    jobs: list[tuple[int, int, int]],
    spare: int,
    swap_memory: int,
    groups: str,
    states: str,
    cancelled: dict[int, int],
    overlaps: bool,
) -> None:
    pages = max(-(-(length + outputs) // 4) for _, length, outputs in jobs) + spare
    specs = tuple(replace(group, num_pages=pages + 12 * bool(group.window)) for group in GROUPS[groups])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        wait_for_disk(patch)
        store = None if swap_memory else Path(folder)
        config = small_config(num_pages=pages, swap_memory=swap_memory, cache_dir=store)
        harness = Watched(config, groups=specs, states=STATES[states], feeds=overlaps)
        requests = []
        for number, length, outputs in jobs:
            params = SamplingParams(max_tokens=outputs, ignore_eos=True)
            ids = prompt(number, length)
            requests.append((harness.add(ids, params), ids, params))
            harness.step()
        for step in range(1, 61):
            for index, (request, *_) in enumerate(requests):
                if cancelled.get(index) == step:
                    harness.core.abort(request)
            harness.step()
        harness.run_to_the_end()
        for index, (request, ids, params) in enumerate(requests):
            if index not in cancelled:
                assert harness.result(request) == alone(ids, params)
        harness.assert_idle()
        harness.core.close()
