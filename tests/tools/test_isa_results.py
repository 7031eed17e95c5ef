"""Runs of `octavo bench kernels --compare-isa` as one benchmark file."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import isa_results
from docs_site.benchmarks import Comparison

RUN: dict[str, Any] = {
    "machine": "Some CPU, 2 CPUs",
    "date": "2026-11-23",
    "commit": "abc1234",
    "command": "octavo bench kernels --compare-isa --quick --formats fp4 --rounds 2 --json",
    "quick": True,
    "rounds": 2,
    "levels": ["generic", "avx2"],
    "cases": {
        "generic": [
            {"kernel": "decode", "of": "fp4", "size": 1024, "us": 90.04, "ns_per_byte": 1.0},
            {"kernel": "write", "of": "fp4", "size": 1024, "us": 50.0, "ns_per_byte": 1.0},
        ],
        "avx2": [{"kernel": "decode", "of": "fp4", "size": 1024, "us": 10.0, "ns_per_byte": 0.1}],
    },
}


def test_cases_that_all_runs_have_at_all_levels_become_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = copy.deepcopy(RUN)
    second["cases"]["avx2"][0]["us"] = 12.0
    second["command"] = second["command"].replace("fp4", "fp4,bf16")
    files = [tmp_path / "1.txt", tmp_path / "2.txt"]
    for path, run in zip(files, (RUN, second), strict=True):
        path.write_text("slower than at a lower level: nothing\n" + json.dumps(run) + "\n")
    output = tmp_path / "isa.json"
    arguments = [*map(str, files), "--note", "Busy.", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["isa_results.py", *arguments])
    isa_results.main()
    written = json.loads(output.read_text())
    (row,) = written["rows"]
    assert (row["kernel"], row["of"], row["positions or rows"]) == ("decode", "fp4", "1024")
    assert (row["generic"], row["avx2"]) == ([90.0, 90.0], [10.0, 12.0])
    assert (written["machine"], written["commit"]) == ("Some CPU, 2 CPUs", "abc1234")
    page = Comparison(name="isa", **written).markdown()
    assert "| decode | fp4 | 1024 |" in page
    assert "processor time" in page
    assert written["commands"] == [RUN["command"], second["command"]]
    assert all(f"--compare-isa --quick --formats {names} --rounds 2" in page for names in ("fp4", "fp4,bf16"))


def test_runs_of_two_machines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"differ in machine: .*'Other'\]; give runs of one kind"):
        isa_results.comparison([RUN, RUN | {"machine": "Other"}], [])
