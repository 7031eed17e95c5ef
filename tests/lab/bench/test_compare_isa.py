from __future__ import annotations

import argparse
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.api.errors import InvalidConfig
from octavo_lab.bench import compare_isa
from octavo_lab.bench import kernels as bench_kernels
from octavo_lab.bench.compare_isa import Case, Figure, Figures, find_cliffs, find_dear, keep_best

FP4, FP5 = Case("decode", "fp4", 4096), Case("decode", "fp5", 4096)


def test_a_case_that_a_lower_level_does_faster_is_a_cliff() -> None:
    best: dict[str, Figures] = {
        "generic": {FP4: Figure(90, 9), FP5: Figure(100, 8)},
        "avx2": {FP4: Figure(10, 1), FP5: Figure(12, 1)},
        "avx512": {FP4: Figure(10.9, 1), FP5: Figure(60, 5)},
    }
    assert list(find_cliffs(best)) == [{"level": "avx512", "than": "avx2", **FP5._asdict(), "ratio": 5}]


def test_what_takes_much_longer_for_a_byte_than_its_reference_is_dear() -> None:
    written, linear = Case("write", "fp5", 4096), Case("linear", "int5", 8)
    found: Figures = {
        FP4: Figure(10, 1.0), FP5: Figure(20, 1.6), written: Figure(99, 99.0),
        linear._replace(of="int4"): Figure(10, 1.0), linear: Figure(12, 1.4),
    }  # fmt: skip
    (dear,) = find_dear({"avx2": found})
    assert (dear["of"], dear["than"], dear["ratio"]) == ("fp5", "fp4", 1.6)


def test_the_best_round_counts() -> None:
    best: Figures = {}
    for us in (12.0, 10.0, 11.0):
        keep_best(best, {FP4: Figure(us, us / 10)})
    assert best == {FP4: Figure(10.0, 1.0)}


def test_an_asked_for_level_and_a_missing_extension_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_isa, "native_instructions", lambda: ("none", 1))
    with pytest.raises(InvalidConfig, match="this installation has none"):
        compare_isa.available_levels()
    monkeypatch.setattr(compare_isa, "native_instructions", lambda: ("avx2", 1))
    monkeypatch.setenv("OCTAVO_CPU_ISA", "avx2")
    with pytest.raises(InvalidConfig, match="OCTAVO_CPU_ISA=avx2; unset it"):
        compare_isa.available_levels()


def test_a_result_says_which_machine_and_commit_it_is_of(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor : 0\nmodel name\t: Some CPU @ 2 GHz\nprocessor : 1\nmodel name\t: Some CPU @ 2 GHz\n"
    )
    assert compare_isa.machine_name(info) == f"Some CPU @ 2 GHz, {os.cpu_count()} CPUs"
    assert compare_isa.machine_name(tmp_path / "none").startswith(platform.machine())
    commit = compare_isa.commit_of_checkout()
    assert commit is None or re.fullmatch(r"[0-9a-f]{7,40}\+?", commit)


def test_quick_runs_are_of_one_thread_and_native_kernels() -> None:
    parser = argparse.ArgumentParser()
    bench_kernels.add_arguments(parser)
    with pytest.raises(InvalidConfig, match="one thread, not of 2; leave --threads out"):
        bench_kernels.run(parser.parse_args(["--quick", "--threads", "2"]))
    with pytest.raises(InvalidConfig, match="of the reference backend"):
        bench_kernels.run(parser.parse_args(["--quick", "--backend", "reference"]))


def test_the_command_that_is_told_measures_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_isa, "available_levels", lambda: ("generic",))
    measured: list[dict[str, Any]] = []

    def measure(args: argparse.Namespace, _level: str) -> dict[str, Any]:
        measured.append(vars(args))
        return {"attention": [], "linear": []}

    monkeypatch.setattr(compare_isa, "_measure", measure)
    parser = argparse.ArgumentParser()
    bench_kernels.add_arguments(parser)
    flags = (
        "--compare-isa --rounds 1 --contexts 64,128 --formats fp4 --weights int4 --page-size 16 --threads 1"
    )
    told = bench_kernels.run(parser.parse_args(flags.split()))["command"].split()
    assert told[:3] + told[-1:] == ["octavo", "bench", "kernels", "--json"]
    bench_kernels.run(parser.parse_args(told[3:-1]))
    assert measured[0] == measured[1]


def test_what_is_found_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_isa, "available_levels", lambda: ("avx2", "avx512"))
    measured: list[tuple[str, Any, Any, Any, Any]] = []
    rows = [{"kernel": "write", "k_format": name, "context": 64, "gb_s": 1.0} for name in ("fp16", "int8")]

    def measure(args: argparse.Namespace, level: str) -> dict[str, Any]:
        measured.append((level, args.formats, args.contexts, args.weights, args.rows))
        slow = {"fp16": len(measured) <= 2 and level == "avx512", "int8": level == "avx512"}
        return {
            "attention": [row | {"us": 3 if slow[str(row["k_format"])] else 2} for row in rows],
            "linear": [],
        }

    monkeypatch.setattr(compare_isa, "_measure", measure)
    parser = argparse.ArgumentParser()
    bench_kernels.add_arguments(parser)
    flags = "--compare-isa --rounds 1 --contexts 64,128 --formats fp16,int8,bf16 --weights int8 --rows 8"
    result = bench_kernels.run(parser.parse_args(flags.split()))
    assert [(cliff["of"], cliff["ratio"]) for cliff in result["cliffs"]] == [("int8", 1.5)]
    again = (["fp16", "fp4", "int8"], [64], ["int4"], [1])
    assert measured[2:] == [("avx2", *again), ("avx512", *again)]


@pytest.mark.slow
def test_each_level_of_this_machine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench_kernels.add_arguments(parser)
    flags = (
        "--compare-isa --quick --rounds 1 --contexts 64 --chunk 16 --rows 1 --formats bf16,fp4 --weights int4"
    )
    result = bench_kernels.run(parser.parse_args(flags.split()))
    json.dumps(result)
    assert result["levels"][0] == "generic"
    assert all(result[key] for key in ("quick", "machine", "date"))
    for level in result["levels"]:
        cases = {(row["kernel"], row["of"], row["size"]) for row in result["cases"][level]}
        assert cases == {
            *((kernel, name, 64) for kernel in ("decode", "chunk", "write") for name in ("bf16", "fp4")),
            ("linear", "int4", 1),
        }
    assert "slower than at a lower level" in capsys.readouterr().out
