"""The benchmark keeps its contract; how fast it is is not a test's business."""

from __future__ import annotations

import argparse

import pytest

from octavo.engine.bench import scheduler as bench


def test_the_benchmark_prints_a_table_and_returns_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    result = bench.run(parser.parse_args(["--sequences", "1,3", "--steps", "40", "--repeats", "1"]))
    assert result["bench"] == "scheduler"
    assert set(result["step_us"]) == {"1", "3"}
    assert all(value > 0 for value in result["step_us"].values())
    assert result["prompt_cold_us"] > 0
    assert result["prompt_warm_us"] > 0
    assert "us per step" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["0", "1,-2", "x"])
def test_counts_must_be_positive(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--sequences", text])
    assert "--sequences" in capsys.readouterr().err
