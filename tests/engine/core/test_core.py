from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_harness import Harness
from fakes import small_config
from ledger_runner import ALPHABET, LedgerRunner
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.request import Request
from octavo.engine.executor.sampling.sampler import Sampled
from octavo.scheduler.waiting import WaitingQueue
from oracle import alone

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


@dataclass(frozen=True)
class Arrival:
    prompt: bytes
    params: SamplingParams
    at_step: int
    abort_at: int | None
    salt: bytes


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    at_step = draw(st.integers(0, 12))
    return Arrival(
        # Few letters and shared prefixes, so that prompts share pages.
        prompt=draw(st.sampled_from([b"", b"aabbaabbaabb"]))
        + bytes(draw(st.lists(st.sampled_from(b"ab"), min_size=1, max_size=12))),
        params=SamplingParams(
            max_tokens=draw(st.integers(1, 10)),
            temperature=draw(st.sampled_from([0, 1])),
            seed=draw(st.integers(0, 3)),
            n=draw(st.integers(1, 3)),
            stop=tuple(draw(st.lists(st.text("abc \n", min_size=1, max_size=3), max_size=2))),
            stop_ids=tuple(draw(st.sets(st.sampled_from(ALPHABET), max_size=1))),
            ignore_eos=draw(st.booleans()),
            speculate=draw(st.sampled_from([None, "off", "ngram"])),
        ),
        at_step=at_step,
        abort_at=draw(st.none() | st.integers(at_step, at_step + 12)),
        salt=draw(st.sampled_from([b"", b"tenant"])),
    )


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    max_running = draw(st.integers(1, 6))
    page_size = draw(st.sampled_from([1, 2, 4, 8]))
    return EngineConfig(
        page_size=page_size,
        num_pages=-(-draw(st.integers(36, 90)) // page_size),  # the longest request needs 34 positions
        max_running=max_running,
        max_step_tokens=max_running + draw(st.integers(0, 20)),
        speculate=draw(st.sampled_from(["off", "ngram"])),
        prefix_cache=draw(st.booleans()),
        async_steps=draw(st.booleans()),
    )


@given(configs(), st.lists(arrivals(), min_size=1, max_size=8), st.sampled_from([0, 7]))
def test_served_together_is_served_alone(config: EngineConfig, todo: list[Arrival], ends_every: int) -> None:
    harness = Harness(config, ends_every=ends_every, feeds=config.async_steps is True)
    served: dict[Request, Arrival] = {}
    aborts: list[tuple[int, Request]] = []
    now = 0
    while len(served) < len(todo) or harness.core.has_work:
        for arrival in todo:
            if arrival.at_step == now:
                request = harness.add(arrival.prompt, arrival.params, salt=arrival.salt)
                served[request] = arrival
                if arrival.abort_at is not None:
                    aborts.append((arrival.abort_at, request))
        for at_step, request in aborts:
            if at_step == now:
                harness.core.abort(request)
        harness.step()
        now += 1
        assert now < 5000, "the engine gets nowhere"
    for request, arrival in served.items():
        for index in range(arrival.params.n):
            expected = alone(list(arrival.prompt), arrival.params, index=index, ends_every=ends_every)
            result = harness.result(request, index)
            if result.finish_reason is FinishReason.ABORT:
                assert arrival.abort_at is not None
                assert result.token_ids == expected.token_ids[: len(result.token_ids)]
                assert expected.text.startswith(result.text) or arrival.params.stop
            else:
                assert result == expected
    harness.assert_idle()
    generated = sum(len(harness.result(r, i).token_ids) for r, a in served.items() for i in range(a.params.n))
    assert sum(record.generated_tokens for record in harness.observer.records) == generated
    ended = [record.request_id for step in harness.observer.records for record in step.ended]
    assert Counter(ended) == Counter(request.request_id for request in served)


@pytest.mark.parametrize("where", [0, 60], ids=["first chunk", "last chunk"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_that_breaks_the_model_fails_alone(where: int, n: int) -> None:
    harness = Harness(small_config(max_step_tokens=32, num_pages=64), poison=255)
    good = [harness.add(b"good" * k, SamplingParams(max_tokens=20)) for k in (1, 3)]
    prompt = list(b"a" * 70)
    prompt[where] = 255
    bad = harness.add(prompt, SamplingParams(max_tokens=5, n=n, seed=0))
    harness.run()
    for index in range(n):
        assert harness.result(bad, index).finish_reason is FinishReason.ERROR
    assert all(delta.error for delta in harness.deltas[bad] if delta.finish_reason)
    for k, request in zip((1, 3), good, strict=True):
        assert harness.result(request) == alone(list(b"good" * k), SamplingParams(max_tokens=20))
    harness.assert_idle()
    # Pages of the failed step must not be found by another request.
    again = harness.add(prompt, SamplingParams(max_tokens=5))
    harness.run()
    assert max(delta.cached_tokens for delta in harness.deltas[again]) <= where


def test_a_failure_while_making_output_ends_one_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness()
    bad = harness.add(b"bad", SamplingParams(max_tokens=5))
    good = harness.add(b"good", SamplingParams(max_tokens=5))

    def explode(_token: int) -> str:
        raise RuntimeError("broken vocabulary")

    monkeypatch.setattr(bad.samples[0]._detokenizer, "add", explode)
    harness.run()
    assert harness.deltas[bad][-1].error == "building the output failed: broken vocabulary"
    assert harness.result(good) == alone(list(b"good"), SamplingParams(max_tokens=5))
    assert "broken vocabulary" in caplog.text
    harness.assert_idle()


def test_errors_of_the_runner_end_the_step() -> None:
    def explode() -> None:
        raise MemoryError("device lost")

    harness = Harness(before_step=explode)
    harness.add(b"x", SamplingParams())
    with pytest.raises(MemoryError, match="device lost"):
        harness.step()


def test_requests_that_no_step_can_serve_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    stuck = [harness.add(b"stuck", replace(FOUR, n=n)) for n in (1, 3)]
    with monkeypatch.context() as patch:
        patch.setattr(WaitingQueue, "admission_order", lambda self: iter(()))  # noqa: ARG005
        harness.step()
        harness.step()
    for request in stuck:
        assert {delta.finish_reason for delta in harness.deltas[request]} == {FinishReason.ERROR}
        assert "bug" in str(harness.deltas[request][0].error)
    harness.assert_idle()
    later = harness.add(b"later", FOUR)
    harness.run()
    assert harness.result(later) == alone(list(b"later"), FOUR)


def test_an_observer_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()

    def explode(_record: object) -> None:
        raise RuntimeError("no disk")

    harness.observer.step = explode  # type: ignore[method-assign,assignment]
    request = harness.add(b"x", SamplingParams(max_tokens=3))
    harness.run()
    assert harness.result(request).finish_reason is FinishReason.LENGTH
    assert "the observer failed" in caplog.text


def test_the_observer_gets_each_step_once() -> None:
    harness = Harness(small_config(max_step_tokens=8, page_size=4))
    request = harness.add(b"0123456789", SamplingParams(max_tokens=3))
    harness.run()
    records = harness.observer.records
    assert [record.prefill_tokens for record in records] == [8, 2, 0, 0]
    assert [record.decode_tokens for record in records] == [0, 0, 1, 1]
    assert [record.generated_tokens for record in records] == [0, 1, 1, 1]
    assert [len(record.queue_s) for record in records] == [1, 0, 0, 0]
    assert [len(record.ttft_s) for record in records] == [0, 1, 0, 0]
    assert [len(record.inter_token_s) for record in records] == [0, 0, 1, 1]
    (ended,) = records[-1].ended
    assert (ended.request_id, ended.finish_reason) == (request.request_id, FinishReason.LENGTH)
    assert (ended.prompt_tokens, ended.generated_tokens) == (10, 3)
    assert ended.ttft_s is not None
    assert 0 <= ended.queue_s <= ended.ttft_s <= ended.total_s


def test_finishing_ends_remaining_requests() -> None:
    harness = Harness()
    left = [harness.add(b"x", SamplingParams(max_tokens=9, n=2)) for _ in range(3)]
    harness.step()
    updates = harness.core.finish()
    assert [update.request for update in updates] == [request for request in left for _ in range(2)]
    assert {update.delta.finish_reason for update in updates} == {FinishReason.ABORT}
    assert len(harness.observer.records[-1].ended) == 3
    assert harness.core.gauges.pages_held == 0
    harness.core._blocks.check()


def test_a_failure_that_the_parameters_bring_about_is_recorded_as_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    for invalid in (True, False):
        failed = Sampled(token=None, error="no token is left", invalid=invalid)
        monkeypatch.setattr(LedgerRunner, "_sample", lambda *_, failed=failed: failed)
        request = harness.add(b"ab", SamplingParams(max_tokens=2))
        harness.run()
        (delta,) = harness.deltas[request]
        assert (delta.finish_reason, delta.error) == (FinishReason.ERROR, "no token is left")
        ended = [record for step in harness.observer.records for record in step.ended]
        assert ended[-1].invalid == invalid
    harness.assert_idle()
