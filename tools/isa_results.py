"""Put runs of ``octavo bench kernels --compare-isa --json`` of one machine into one benchmark file.

``python tools/isa_results.py RUN... --output docs/benchmarks/results/NAME.json``, each RUN being what one
run printed. Machine, date and commit are those of the last run; cases that not every run has are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per case, in the order of the first run: microseconds at each level, one figure per run."""
    tables = [
        {
            level: {(case["kernel"], case["of"], case["size"]): case["us"] for case in cases}
            for level, cases in run["cases"].items()
        }
        for run in runs
    ]
    levels = runs[0]["levels"]
    shared = [
        key
        for key in tables[0][levels[0]]
        if all(key in found[level] for found in tables for level in levels)
    ]
    return [
        {
            "kernel": kernel,
            "of": of,
            "positions or rows": str(size),
            **{level: [round(found[level][kernel, of, size], 1) for found in tables] for level in levels},
        }
        for kernel, of, size in shared
    ]


def comparison(runs: Sequence[dict[str, Any]], notes: Sequence[str]) -> dict[str, Any]:
    """Return the data for tools/docs_site/benchmarks.py; ValueError for runs that do not belong together."""
    for field in ("machine", "levels", "quick"):
        if len({json.dumps(run[field]) for run in runs}) > 1:
            raise ValueError(
                f"the runs differ in {field}: {[run[field] for run in runs]}; give runs of one kind"
            )
    last = runs[-1]
    clock = (
        "One thread, processor time" if last["quick"] else "Wall time, all threads"
    ) + f"; the best of {last['rounds']} rounds, levels in turns. One layer of Qwen3-0.6B's shape."
    return {
        "title": "The kernels at each instruction set",
        "date": last["date"],
        "machine": last["machine"],
        "commit": last["commit"] or "unknown",
        "commands": [run["command"] for run in runs],
        "notes": [clock, *notes],
        "labels": ["kernel", "of", "positions or rows"],
        "columns": {level: f"{level}, us" for level in last["levels"]},
        "rows": rows(runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--note", action="append", default=[])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    runs = [json.loads(path.read_text().splitlines()[-1]) for path in args.runs]
    args.output.write_text(json.dumps(comparison(runs, args.note), indent=1) + "\n")


if __name__ == "__main__":
    main()
