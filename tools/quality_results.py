"""Pool runs of ``octavo bench quality --json`` over several seeds into one benchmark file.

``python tools/quality_results.py RUN... --machine M --commit C --output docs/benchmarks/results/NAME.json``,
each RUN being what one run printed. Formats that not every run has are pooled over those that have them.
Answers are counted where every run counted them; models that nobody asks have the divergence alone.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Z_95 = 1.96  # of a normal distribution: half of an interval that holds the truth in 95 % of cases


def pooled(parts: Sequence[tuple[int, float, float]]) -> tuple[int, float, float]:
    """Questions, difference of the share of right answers and its standard error, over independent parts."""
    total = sum(questions for questions, _, _ in parts)
    mean = sum(questions * mean for questions, mean, _ in parts) / total
    error = math.sqrt(sum((questions * error) ** 2 for questions, _, error in parts)) / total
    return total, mean, error


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per format, in the order of the first run: figures in percentage points, one per run."""
    baseline = runs[0]["baseline"]
    wide = runs[0]["formats"][baseline]["bytes_per_token"]
    rows = []
    for name, shape in runs[0]["formats"].items():
        having = [run["formats"][name] for run in runs if name in run["formats"]]
        if name == baseline:
            continue
        rows.append(
            {
                "pages": name.partition("+")[0],
                "residual pages": shape["residual_pages"],
                "bits a value": f"{16 * shape['bytes_per_token'] / wide:.2f}",
                **(_answers(having) if all("recall" in run for run in having) else {}),
                "kl": [round(1000 * run["kl"], 4) for run in having],
                "agreement": [round(100 * run["top1_agreement"], 2) for run in having],
            }
        )
    return rows


def _answers(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one format: right answers that bf16 pages have more or fewer of."""
    parts = [
        pooled([(each["questions"], each["difference"], each["standard_error"]) for each in lengths])
        for lengths in (list(run["recall"].values()) for run in runs)
    ]
    questions, mean, error = pooled(parts)
    return {
        "questions": f"{questions:,}",
        "points, 95 % interval": f"{100 * mean:+.2f} ± {100 * Z_95 * error:.2f}",
        "difference": [round(100 * mean, 3) for _, mean, _ in parts],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    for name in ("machine", "commit", "date", "command", "title"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--note", action="append", default=[])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    runs = [json.loads(path.read_text().splitlines()[-1]) for path in args.runs]
    rows = summary(runs)
    asked = "questions" in rows[0]
    result = {
        "title": args.title,
        "date": args.date,
        "machine": args.machine,
        "commit": args.commit,
        "commands": [args.command],
        "notes": args.note,
        "labels": ["pages", "residual pages", "bits a value"]
        + (["questions", "points, 95 % interval"] if asked else []),
        "columns": ({"difference": "points, median of seeds"} if asked else {})
        | {"kl": "KL, 1/1000 nat", "agreement": "likeliest token agrees, %"},
        "rows": rows,
    }
    args.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
