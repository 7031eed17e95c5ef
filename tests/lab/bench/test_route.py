from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from octavo_lab.bench import route as bench
from octavo_lab.cache_sim.trace import read_trace
from router import needs_router

EXCERPT = Path(__file__).parents[2] / "data" / "conversation_trace_500.jsonl"


def test_requests_that_share_pages_share_words() -> None:
    requests = read_trace(EXCERPT)[:40]
    questions = bench.questions_of(requests, 4)
    for request, question in zip(requests, questions, strict=True):
        words = question.text.split()
        assert len(words) == 4 * len(request.page_ids)
        assert question.max_tokens == max(1, request.output_tokens // 128)
        for other, its in zip(requests, questions, strict=True):
            pairs = enumerate(zip(request.page_ids, other.page_ids, strict=False))
            shared = next(
                (at for at, (a, b) in pairs if a != b), min(len(request.page_ids), len(other.page_ids))
            )
            assert words[: 4 * shared] == its.text.split()[: 4 * shared]
    assert len({question.text for question in questions}) == len(questions)


@pytest.mark.slow
@pytest.mark.server
@needs_router
def test_cache_aware_routing_finds_more_of_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "timestamp": 0,
            "input_length": 5120,
            "output_length": 64,
            "hash_ids": [n % 3 * 100 + k for k in range(10)],
        }
        for n in range(12)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    words = [str(tmp_path / "trace.jsonl"), "--concurrency", "1", "--num-pages", "256", "--page-size", "16"]
    found = bench.run(parser.parse_args(words))
    aware, blind = (found["policies"][name][0] for name in bench.POLICIES)
    assert aware["prompt_tokens"] == blind["prompt_tokens"] > 12 * 160
    assert aware["hit_ratio"] > 0.5
    assert aware["hit_ratio"] > blind["hit_ratio"]
    for measured in (aware, blind):
        assert 0 < measured["ttft_s"]["p50"] <= measured["e2e_s"]["p99"] < measured["wall_s"]
    assert "round_robin" in capsys.readouterr().out
