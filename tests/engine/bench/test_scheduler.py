"""The benchmark keeps its contract; how fast it is is not a test's business."""

from __future__ import annotations

import argparse
import importlib
import sys
from types import ModuleType

import pytest

from octavo.engine.bench import scheduler as bench
from octavo.engine.bench.scheduler_vllm import Missing, open_vllm


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
    assert set(result["vllm"]) in ({"skipped"}, {"version", "prompt_cold_us", "prompt_warm_us"})
    out = capsys.readouterr().out
    assert "us per step" in out
    assert ("not compared with vLLM: " in out) == ("skipped" in result["vllm"])


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    absent = open_vllm(8, 4, max_tokens=8)
    assert isinstance(absent, Missing)
    assert "cannot be imported" in absent.reason


def test_another_vllm_is_named_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", ModuleType)
    other = open_vllm(8, 4, max_tokens=8)
    assert isinstance(other, Missing)
    assert "another interface" in other.reason


def test_vllm_finds_what_it_was_given() -> None:
    vllm = open_vllm(16, 4, max_tokens=32)
    if isinstance(vllm, Missing):
        pytest.skip(vllm.reason)
    found = []
    for _ in range(2):
        assert vllm.serve(list(range(32))) > 0
        found.append(vllm.num_found)
    assert found == [0, 28], "all but the page that holds the last token"


@pytest.mark.parametrize("text", ["0", "1,-2", "x"])
def test_counts_must_be_positive(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--sequences", text])
    assert "--sequences" in capsys.readouterr().err
