from __future__ import annotations

import argparse
import re

import pytest

from octavo.engine.client.token_times import TokenTimes
from octavo_lab.bench.latencies import Slo, Trace, slo_limits, summarize


def trace(*messages: tuple[float, int], e2e_s: float, cached_tokens: int = 0) -> Trace:
    times = TokenTimes(0.0)
    for message in messages:
        times.add(*message)
    return Trace(times, e2e_s, cached_tokens)


FAST = trace((0.1, 1), (0.2, 1), (0.4, 1), e2e_s=0.4, cached_tokens=4)
SLOW = trace((0.3, 1), (0.4, 1), (1.4, 1), e2e_s=1.4)


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


def test_limits_are_read_as_others_write_them() -> None:
    assert slo_limits("ttft:200") == {"ttft": 200.0}
    assert str(Slo(slo_limits("ttft:200,tpot:12.5"))) == "ttft:200 tpot:12.5"
    for text in ("ttft", "ttft:", "ttft:0", "ttft:-1", "ttft:inf", "ttft:nan", "gap:5", ":5"):
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(text))):
            slo_limits(text)
