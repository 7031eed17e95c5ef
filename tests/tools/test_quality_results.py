"""Runs of `octavo bench quality` over several seeds, pooled into one benchmark file."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

import quality_results
from docs_site.benchmarks import Comparison


def run(difference: float, error: float) -> dict[str, Any]:
    def row(bytes_per_token: float, *suites: tuple[int, float, float]) -> dict[str, Any]:
        recall = {
            str(n): {"questions": questions, "difference": mean, "standard_error": spread}
            for n, (questions, mean, spread) in enumerate(suites)
        }
        shape = {"residual_pages": 2, "bytes_per_token": bytes_per_token}
        return {**shape, "kl": 0.001, "top1_agreement": 0.9, "recall": recall}

    return {
        "baseline": "bf16",
        "formats": {
            "bf16": row(2048, (100, 0, 0), (300, 0, 0)),
            "fp4+2": row(544, (100, difference, error), (300, 0, error)),
        },
    }


def test_every_question_weighs_the_same() -> None:
    total, mean, error = quality_results.pooled([(100, -0.04, 0.02), (300, 0.0, 0.01)])
    assert (total, mean) == (400, -0.01)
    assert error == pytest.approx(math.hypot(100 * 0.02, 300 * 0.01) / 400)


def written(runs: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """What the tool makes of runs, as the site reads it."""
    files = [folder / str(number) for number in range(len(runs))]
    for file, each in zip(files, runs, strict=True):
        file.write_text("a table for people\n" + json.dumps(each) + "\n")
    target = folder / "result.json"
    settings = ["--machine", "m", "--commit", "c", "--date", "d", "--command", "x", "--title", "t"]
    monkeypatch.setattr(sys, "argv", ["x", *map(str, files), *settings, "--output", str(target)])
    quality_results.main()
    return Comparison(name="result", **json.loads(target.read_text()))


def test_seeds_are_pooled_and_shown_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = written([run(difference, 0.01) for difference in (-0.04, 0.02)], tmp_path, monkeypatch)
    (row,) = result.rows
    assert (row["pages"], row["residual pages"], row["bits a value"]) == ("fp4", 2, "4.25")
    assert row["difference"] == [-1.0, 0.5]
    error = 1.96 * 100 * 0.01 * math.hypot(100, 300) / 400 / math.sqrt(2)
    assert row["points, 95 % interval"] == f"-0.25 ± {error:.2f}"
    assert "-0.25 (-1 to 0.5)" in result.markdown()


def test_models_that_nobody_asks_have_their_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unasked = run(0.0, 0.0)
    for row in unasked["formats"].values():
        del row["recall"]
    result = written([unasked, unasked], tmp_path, monkeypatch)
    (row,) = result.rows
    assert "questions" not in row
    assert "questions" not in result.markdown()
    assert (row["kl"], row["agreement"]) == ([1.0, 1.0], [90.0, 90.0])
