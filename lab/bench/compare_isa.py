"""``octavo bench kernels --compare-isa``: cases that a higher instruction set makes slower.

Each instruction set (level) runs in its own process. Levels are interleaved, and the best round of each case
counts. The benchmark lists

- cliffs: cases that take more than ``CLIFF`` times as long as at a lower level;
- formats and weights that take more than ``PER_BYTE`` times as long per byte as fp4 pages or int4 weights.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from octavo.engine.api.errors import InvalidConfig
from octavo.kernels.backends import native_instructions

LEVELS = ("generic", "avx2", "avx512", "amx")
CONTEXTS = (512, 4096)
"""Default context lengths; 32,768 positions would take minutes at the lowest level."""
CLIFF = 1.1
PER_BYTE = 1.5


class Case(NamedTuple):
    kernel: str
    of: str
    size: int


class Figure(NamedTuple):
    """Microseconds, and nanoseconds per byte read or written."""

    us: float
    ns_per_byte: float


Figures = dict[Case, Figure]


def compare_levels(args: argparse.Namespace) -> dict[str, Any]:
    levels = available_levels()
    best: dict[str, Figures] = {level: {} for level in levels}
    _measure_rounds(args, best)
    if found := [*find_cliffs(best), *find_dear(best)]:
        print(f"measured again: {len(found)} cases", file=sys.stderr)
        _measure_rounds(only_cases(args, found), best)
    cliffs, dear = list(find_cliffs(best)), list(find_dear(best))
    _print_findings("slower than at a lower level", cliffs)
    _print_findings(f"more than {PER_BYTE:g} times the reference's time for a byte", dear)
    return {
        "bench": "kernels-compare-isa",
        **_origin(),
        "command": shlex.join(
            [
                "octavo",
                "bench",
                "kernels",
                "--compare-isa",
                *_flags(args),
                "--rounds",
                str(args.rounds),
                "--json",
            ]
        ),
        "quick": args.quick,
        "levels": list(levels),
        "rounds": args.rounds,
        "cases": {
            level: [{**case._asdict(), **figure._asdict()} for case, figure in found.items()]
            for level, found in best.items()
        },
        "cliffs": cliffs,
        "dear": dear,
    }


def only_cases(args: argparse.Namespace, found: Sequence[Mapping[str, Any]]) -> argparse.Namespace:
    linear = [case for case in found if case["kernel"] == "linear"]
    paged = [case for case in found if case["kernel"] != "linear"]
    return argparse.Namespace(
        **vars(args)
        | {
            "formats": sorted({"fp4", *(case["of"] for case in paged)}),
            "contexts": sorted({case["size"] for case in paged}) or [min(args.contexts or CONTEXTS)],
            "weights": sorted({"int4", *(case["of"] for case in linear)}),
            "rows": sorted({case["size"] for case in linear}) or [1],
        }
    )


def available_levels() -> tuple[str, ...]:
    """Return the levels of this CPU, the lowest first. Raises InvalidConfig if they cannot be compared."""
    highest, _ = native_instructions()
    if highest not in LEVELS:
        raise InvalidConfig(
            "--compare-isa compares the native kernels' instruction sets, but this installation has "
            f"{highest}; install a C++ compiler and build again, or leave the flag out"
        )
    if asked := os.environ.get("OCTAVO_CPU_ISA"):
        raise InvalidConfig(f"--compare-isa goes through all levels, but OCTAVO_CPU_ISA={asked}; unset it")
    return LEVELS[: LEVELS.index(highest) + 1]


def figures(result: Mapping[str, Any]) -> Figures:
    """Return the figures in a JSON output of ``octavo bench kernels``, by case."""
    found: Figures = {}
    for row in result["attention"]:
        found[Case(row["kernel"], row["k_format"], row["context"])] = Figure(row["us"], 1 / row["gb_s"])
    for row in result["linear"]:
        found[Case("linear", row["weights"], row["rows"])] = Figure(row["us"], 1 / row["gb_s"])
    return found


def keep_best(best: Figures, found: Figures) -> None:
    for case, figure in found.items():
        if case not in best or figure.us < best[case].us:
            best[case] = figure


def find_cliffs(best: Mapping[str, Figures]) -> Iterator[dict[str, Any]]:
    """Yield cases that a lower level computes faster, with the ratio of the two times."""
    levels = list(best)
    for index, level in enumerate(levels):
        for case, figure in best[level].items():
            lower = min(levels[:index], key=lambda name: best[name][case].us, default=None)
            if lower is not None and figure.us > CLIFF * best[lower][case].us:
                yield {
                    "level": level,
                    "than": lower,
                    **case._asdict(),
                    "ratio": figure.us / best[lower][case].us,
                }


def find_dear(best: Mapping[str, Figures]) -> Iterator[dict[str, Any]]:
    """Yield cases that take longer per byte than fp4 pages or int4 weights; writes are left out."""
    for level, found in best.items():
        for case, figure in found.items():
            than = "int4" if case.kernel == "linear" else "fp4"
            reference = found.get(case._replace(of=than))
            if case.kernel == "write" or reference is None:
                continue
            ratio = figure.ns_per_byte / reference.ns_per_byte
            if ratio > PER_BYTE:
                yield {"level": level, "than": than, **case._asdict(), "ratio": ratio}


def _origin() -> dict[str, str | None]:
    return {"machine": machine_name(), "date": date.today().isoformat(), "commit": commit_of_checkout()}


def machine_name(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name from Linux (elsewhere its architecture) and its number of CPUs."""
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs"


def commit_of_checkout() -> str | None:
    """Return the commit of this file's checkout, with "+" for local changes; None without a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--dirty=+"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _flags(args: argparse.Namespace) -> list[str]:
    contexts = args.contexts or (None if args.quick else CONTEXTS)
    flags = {
        "--contexts": contexts and _joined(contexts),
        "--formats": _joined(args.formats),
        "--weights": _joined(args.weights),
        "--chunk": args.chunk,
        "--page-size": args.page_size,
        "--threads": args.threads,
        "--rows": args.rows and _joined(args.rows),
    }
    given = ["--quick"] if args.quick else []
    return given + [str(part) for flag, value in flags.items() if value is not None for part in (flag, value)]


def _measure_rounds(args: argparse.Namespace, best: dict[str, Figures]) -> None:
    for number in range(args.rounds):
        for level, figures_of_level in best.items():
            print(f"round {number + 1} of {args.rounds}: {level}", file=sys.stderr)
            keep_best(figures_of_level, figures(_measure(args, level)))


def _measure(args: argparse.Namespace, level: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "octavo.engine.cli", "bench", "kernels", "--backend", "cpu", "--json"]
    done = subprocess.run(
        command + _flags(args),
        env=os.environ | {"OCTAVO_CPU_ISA": level},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InvalidConfig(f"the run at {level} ended with {done.returncode}; its output is above")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _joined(values: Any) -> str:
    return ",".join(map(str, values))


def _print_findings(title: str, findings: list[dict[str, Any]]) -> None:
    print(f"{title}: {len(findings) or 'nothing'}")
    for found in sorted(findings, key=lambda each: -each["ratio"]):
        print(
            f"  {found['level']:8} {found['kernel']:7} {found['of']:8} {found['size']:6d}  "
            f"{found['ratio']:6.2f} x {found['than']}"
        )
