from __future__ import annotations

from dataclasses import replace

import pytest

from core_harness import Harness
from fakes import small_config
from ledger_runner import LedgerRunner
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from oracle import alone

PLAIN = SamplingParams(max_tokens=12, ignore_eos=True)


def overlapping(**options: object) -> Harness:
    config = small_config(async_steps=True, speculate=options.pop("speculate", "off"))
    return Harness(config, feeds=options.pop("feeds", True), **options)


def runner_of(harness: Harness) -> LedgerRunner:
    assert harness.fake.runner is not None
    return harness.fake.runner


def num_ahead(harness: Harness) -> int:
    calls = runner_of(harness).calls
    return sum(calls.index(("submit", n + 1)) < place for place, (what, n) in enumerate(calls)
               if what == "resolve" and ("submit", n + 1) in calls)  # fmt: skip


def test_the_next_step_is_submitted_before_its_tokens_are_known() -> None:
    harness = overlapping()
    requests = [harness.add(prompt, PLAIN) for prompt in (b"one", b"two")]
    harness.run()
    calls = runner_of(harness).calls
    assert calls[0] == ("submit", 0)
    for number in range(11):
        assert calls[1 + 2 * number : 3 + 2 * number] == [("submit", number + 1), ("resolve", number)]
    assert calls[23:] == [("resolve", 11)], "nothing is computed behind the last token"
    for request, prompt in zip(requests, (b"one", b"two"), strict=True):
        assert harness.result(request) == alone(list(prompt), PLAIN)
    harness.assert_idle()


def test_without_overlap_every_step_is_resolved_first() -> None:
    for harness in (Harness(small_config(async_steps=False), feeds=True), overlapping(feeds=False)):
        harness.add(b"one", PLAIN)
        harness.run()
        assert num_ahead(harness) == 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, ignore_eos=True, frequency_penalty=0.5),
        SamplingParams(max_tokens=12, ignore_eos=True, presence_penalty=0.5),
        SamplingParams(max_tokens=12, ignore_eos=True, repetition_penalty=1.5),
    ],
    ids=["frequency", "presence", "repetition"],
)
def test_requests_that_need_the_token_prevent_overlap(params: SamplingParams) -> None:
    harness = overlapping()
    request = harness.add(b"needs", params)
    harness.run()
    assert num_ahead(harness) == 0
    assert harness.result(request) == alone(list(b"needs"), params)
    other = harness.add(b"needs nothing", PLAIN)
    harness.run()
    assert num_ahead(harness) == 11
    assert harness.result(other) == alone(list(b"needs nothing"), PLAIN)


def test_only_proposed_drafts_prevent_overlap() -> None:
    harness = overlapping()
    free = SamplingParams(max_tokens=12, speculate="ngram", ignore_eos=True)
    request = harness.add(b"nothing to guess", free)
    harness.run()
    assert num_ahead(harness) == 11
    assert harness.result(request) == alone(list(b"nothing to guess"), free)
    harness = overlapping()
    params = replace(free, max_tokens=100)
    request = harness.add(b"again and again", params)
    num_waited = 0
    while harness.core.has_work:
        guessed = bool(request.samples[0].drafts)
        harness.step()
        if guessed and harness.core._live.by_sequence:
            assert harness.core._in_flight is None
            num_waited += 1
    assert num_waited > 1
    assert num_ahead(harness) > 50
    assert harness.result(request) == alone(list(b"again and again"), params)
    harness.assert_idle()


@pytest.mark.parametrize(
    ("params", "ends_every"),
    [(SamplingParams(max_tokens=40), 3), (SamplingParams(max_tokens=40, stop=("a", "\n")), 0)],
    ids=["end token", "stop string"],
)
def test_a_row_after_the_end_is_dropped_with_its_page(params: SamplingParams, ends_every: int) -> None:
    harness = overlapping(ends_every=ends_every)
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [(harness.add(p, params), p, params) for p in (b"abc", b"bcd", b"cde")]
    requests.append((harness.add(b"goes on", long), b"goes on", long))
    harness.run()
    for request, prompt, its in requests:
        assert harness.result(request) == alone(list(prompt), its, ends_every=ends_every)
    assert {harness.result(request).finish_reason for request, *_ in requests[:3]} == {FinishReason.STOP}
    assert num_ahead(harness) > 0
    harness.assert_idle()


def test_a_request_that_is_aborted_with_a_step_in_flight_leaves_nothing() -> None:
    harness = overlapping()
    gone, stays = harness.add(b"gone", PLAIN), harness.add(b"stays", PLAIN)
    for _ in range(4):
        harness.step()
    assert harness.core._in_flight is not None
    held = harness.core._blocks.counts.held
    harness.core.abort(gone)
    assert harness.core._blocks.counts.held < held
    harness.core._blocks.check()
    harness.run()
    assert harness.result(gone).finish_reason is FinishReason.ABORT
    assert harness.result(stays) == alone(list(b"stays"), PLAIN)
    harness.assert_idle()


def test_settling_ends_the_step_in_flight_and_keeps_its_news() -> None:
    harness = overlapping()
    request = harness.add(b"asks", PLAIN)
    for _ in range(3):
        harness.step()
    harness.core.settle()
    assert harness.core._in_flight is None
    assert runner_of(harness).calls[-1][0] == "resolve"
    assert harness.core.has_work
    harness.core.settle()
    harness.run()
    assert harness.result(request) == alone(list(b"asks"), PLAIN)
