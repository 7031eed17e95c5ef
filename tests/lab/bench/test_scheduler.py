from __future__ import annotations

import argparse

import pytest

from octavo_lab.bench import scheduler as bench


def test_the_benchmark_prints_a_table_and_returns_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    result = bench.run(parser.parse_args(["--sequences", "1,3", "--steps", "40", "--repeats", "1"]))
    assert result["bench"] == "scheduler"
    assert set(result["step_us"]) == {"1", "3"}
    assert set(result["step_us_shared"]) == {"1", "3"}
    assert all(value > 0 for kind in ("step_us", "step_us_shared") for value in result[kind].values())
    assert result["prompt_cold_us"] > 0
    assert result["prompt_warm_us"] > 0
    assert "us per step" in capsys.readouterr().out


def test_a_peer_gets_the_same_prompts() -> None:
    served: list[list[int]] = []

    def serve(prompt: list[int]) -> float:
        served.append(prompt)
        return 2.0 if served.count(prompt) == 1 else 1.0

    ours, peer = bench.time_prompts(1, serve)
    assert (peer.cold, peer.warm) == ([2.0], [1.0])
    assert (len(ours.cold), len(ours.warm)) == (1, 1)
    assert all(len(prompt) == bench.PROMPT_TOKENS for prompt in served)


@pytest.mark.parametrize("text", ["0", "1,-2", "x"])
def test_counts_must_be_positive(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--sequences", text])
    assert "--sequences" in capsys.readouterr().err
