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
        return {"residual_pages": 2, "bytes_per_token": bytes_per_token, "kl": 0.001, "recall": recall}

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


def test_seeds_are_pooled_and_shown_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "1", tmp_path / "2"]
    for file, difference in zip(files, (-0.04, 0.02), strict=True):
        file.write_text("a table for people\n" + json.dumps(run(difference, 0.01)) + "\n")
    target = tmp_path / "result.json"
    settings = ["--machine", "m", "--commit", "c", "--date", "d", "--command", "x", "--title", "t"]
    monkeypatch.setattr(sys, "argv", ["x", *map(str, files), *settings, "--output", str(target)])
    quality_results.main()
    result = Comparison(name="result", **json.loads(target.read_text()))
    (row,) = result.rows
    assert (row["pages"], row["residual pages"], row["bits a value"]) == ("fp4", 2, "4.25")
    assert row["difference"] == [-1.0, 0.5]
    error = 1.96 * 100 * 0.01 * math.hypot(100, 300) / 400 / math.sqrt(2)
    assert row["points, 95 % interval"] == f"-0.25 ± {error:.2f}"
    assert "-0.25 (-1 to 0.5)" in result.markdown()
