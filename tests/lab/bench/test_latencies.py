from __future__ import annotations

import argparse
import re

import pytest

from octavo.engine.client.token_times import TokenTimes
from octavo_lab.bench.latencies import Slo, Trace, percentiles, slo_limits, summarize


def trace(*messages: tuple[float, int], e2e_s: float, cached_tokens: int = 0) -> Trace:
    times = TokenTimes(0.0)
    for message in messages:
        times.add(*message)
    return Trace(times, e2e_s, cached_tokens)


FAST = trace((0.1, 1), (0.2, 1), (0.4, 1), e2e_s=0.4, cached_tokens=4)
SLOW = trace((0.3, 1), (0.4, 1), (1.4, 1), e2e_s=1.4)


def test_percentiles_of_nothing_are_zeros() -> None:
    assert percentiles([]) == {"p50": 0, "p95": 0, "p99": 0}
    assert percentiles([3.0, 1.0, 2.0])["p50"] == 2


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 100}, 1),
        ({"ttft": 300}, 2),
        ({"ttft": 300, "tpot": 151}, 1),
        ({"tpot": 149}, 0),
        ({"itl": 999}, 1),
        ({"itl": 1000, "tpot": 551}, 2),
        ({"e2el": 1400}, 2),
        ({"e2el": 1399, "ttft": 99}, 0),
    ],
)
def test_goodput_counts_requests_within_every_limit(limits: dict[str, float], good: int) -> None:
    result = summarize([FAST, SLOW], 2.0, num_requests=3, prompt_tokens=10, slo=Slo(limits))
    assert (result["good_requests"], result["goodput"]) == (good, good / 2)
    assert (result["failed"], result["output_tokens_per_s"], result["total_tokens_per_s"]) == (1, 3, 13)
    assert result["cached_tokens"] == 4


def test_without_limits_there_is_no_goodput() -> None:
    assert "goodput" not in summarize([FAST], 1.0, num_requests=1, prompt_tokens=10)


def test_a_single_token_has_no_time_per_later_token() -> None:
    assert Slo({"tpot": 0.001, "itl": 0.001}).kept_by(trace((5.0, 1), e2e_s=5.0))


def test_tokens_that_come_together_have_one_wait_before_them() -> None:
    merged = trace((0.25, 4), (1.25, 10), (1.5, 1), e2e_s=1.5)
    result = summarize([merged], 2.0, num_requests=1, prompt_tokens=10)
    assert result["itl_s"]["p99"] == pytest.approx(0.9925), "the gaps are 1 s and 0.25 s"
    assert result["output_tokens_per_s"] == 15 / 2
    assert merged.tpot_s == 1.25 / 11, "the first four did not come after the first message"
    assert not Slo({"itl": 999}).kept_by(merged)


def test_tokens_of_one_message_may_have_taken_the_whole_time() -> None:
    assert trace((2.0, 8), e2e_s=2.0).tpot_s == 0.25


def test_limits_are_read_as_others_write_them() -> None:
    assert slo_limits("ttft:200") == {"ttft": 200.0}
    assert str(Slo(slo_limits("ttft:200,tpot:12.5"))) == "ttft:200 tpot:12.5"
    for text in ("ttft", "ttft:", "ttft:0", "ttft:-1", "ttft:inf", "ttft:nan", "gap:5", ":5"):
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(text))):
            slo_limits(text)
