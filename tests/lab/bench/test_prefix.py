from __future__ import annotations

import json
from pathlib import Path

import pytest

import recurrent_models
from octavo.engine.cli import main
from octavo_lab.bench.prefix_cost import share
from octavo_lab.bench.prefix_runs import ANSWER_TOKENS, Chats
from octavo_lab.cache_sim.states import POLICIES


def test_the_experiments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = Chats(conversations=3, turns=2, system_tokens=64, turn_tokens=24)
    monkeypatch.setattr("octavo_lab.bench.prefix.Chats", lambda: chats)
    pytest.importorskip("matplotlib")
    picture = tmp_path / "prefix.png"
    command = ["bench", "prefix", "--prefix-tokens", "64,1000000", "--runs", "1", "--page-size", "16"]
    command += ["--max-model-len", "512", "--num-pages", "40", "--plot", str(picture), "--json"]
    assert main(command) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert (result["bench"], result["model"], result["left_out"]) == ("prefix", "demo", [1_000_000])
    assert "1000000" in out
    (row,) = result["ttft"]
    assert (row["prefix_tokens"], row["cached_tokens"]) == (64, 64)
    assert row["warm_share"] == pytest.approx(row["warm_s"] / row["cold_s"])
    ratios = [pool["hit_ratio"] for pool in result["pools"]]
    assert ratios == sorted(ratios)
    assert result["cache_off"]["hit_ratio"] == 0
    first, second = 64 + 24, 64 + 24 + ANSWER_TOKENS + 24
    found = 2 * 64 + 3 * (first + ANSWER_TOKENS - 1) // 16 * 16
    assert result["salts"]["shared"]["hit_ratio"] == pytest.approx(found / (3 * (first + second)), abs=0.08)
    assert result["salts"]["per_conversation"]["hit_ratio"] < result["salts"]["shared"]["hit_ratio"]
    low, high = result["cost"]["cost_interval"]
    assert low <= result["cost"]["cost"] <= high
    assert result["cost"]["control"]["low"] <= result["cost"]["control"]["high"]
    assert picture.stat().st_size > 10_000


def test_a_model_with_recurrent_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = Chats(conversations=3, turns=2, system_tokens=64, turn_tokens=24)
    monkeypatch.setattr("octavo_lab.bench.prefix.Chats", lambda: chats)
    folder = recurrent_models.make_folder(tmp_path / "model", "qwen3_5")
    command = ["bench", "prefix", "--model", str(folder), "--page-size", "16", "--max-model-len", "512"]
    command += ["--prefix-tokens", "64", "--runs", "1", "--num-pages", "80"]
    assert main([*command, "--only", "ttft", "--only", "states", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["cached_tokens"] for row in result["ttft"]] == [64]
    found = {(row["snapshots"], row["num_snapshots"]): row["hit_ratio"] for row in result["states"]}
    assert {name for name, _ in found} == set(POLICIES)
    assert all(row["snapshot_bytes"] > 0 for row in result["states"])
    for name in POLICIES:
        ratios = [ratio for (snapshots, _), ratio in found.items() if snapshots == name]
        assert len(ratios) > 2
        assert ratios[0] <= ratios[-1]
    first, second = 64 + 24, 64 + 24 + ANSWER_TOKENS + 24
    asked = 3 * (first + second)
    most = 9  # snapshots
    turns = 3 * ((first + ANSWER_TOKENS - 1) // 16 * 16)
    assert found["tail", most] == pytest.approx(turns / asked)
    assert found["tail and junction", most] == pytest.approx((turns + 64) / asked)
    assert found["none", most] == 0
    assert main([*command, "--only", "cost"]) == 2
    assert "does not fit this model" in capsys.readouterr().err
    assert main(["bench", "prefix", "--only", "states", "--num-pages", "80"]) == 2
    assert "demo has none" in capsys.readouterr().err


def test_an_interval_of_pairs() -> None:
    """Of ten pairs, at most 1 is below the median with probability 0.011, at most 2 with 0.055."""
    times = [1.10, 0.90, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08, 1.09]
    found = share([2 * time for time in times], [2.0] * 10)
    assert (found.low, found.median, found.high) == pytest.approx((0.02, 0.055, 0.09))
    assert (share([1.0, 3.0], [1.0, 1.0]).low, share([1.0, 3.0], [1.0, 1.0]).high) == (0.0, 2.0)


def test_flags_that_would_spoil_it_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--no-prefix-cache"], ["--cache-dir", str(tmp_path)]):
        assert main(["bench", "prefix", *flags]) == 2
        assert "drop --no-prefix-cache" in capsys.readouterr().err
