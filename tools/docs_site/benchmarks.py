"""Benchmark results from docs/benchmarks/results/*.json, as tables for the site and the README."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .reference import table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "benchmarks" / "results"
CHART = ROOT / "docs" / "images" / "benchmark.png"
README = ROOT / "README.md"
README_RESULT = "2026-11-26-peers"  # the latest comparison with other engines
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One benchmark file."""

    name: str
    title: str
    date: str
    machine: str
    commit: str
    commands: Sequence[str]
    notes: Sequence[str]
    labels: Sequence[str]
    columns: dict[str, str]
    rows: Sequence[dict[str, Any]]

    def markdown(self) -> str:
        """Return the heading, a table of medians with the range of the runs, the machine and the commands."""
        header = [*self.labels, *self.columns.values()]
        rows = [
            [*(str(row[label]) for label in self.labels), *(_shown(row.get(key, [])) for key in self.columns)]
            for row in self.rows
        ]
        lines = [f"## {self.title}", "", table(header, rows)]
        lines += [f"{self.date}, {self.machine}, commit `{self.commit}`. " + " ".join(self.notes), ""]
        lines += ["```console", *(f"$ {command}" for command in self.commands), "```", ""]
        return "\n".join(lines)


def _shown(runs: Sequence[float]) -> str:
    if not runs:
        return ""
    median = statistics.median(runs)
    text = f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
    return text if len(runs) == 1 else f"{text} ({min(runs):,.4g} to {max(runs):,.4g})"


def comparisons() -> list[Comparison]:
    read = [Comparison(name=path.stem, **json.loads(path.read_text())) for path in RESULTS.glob("*.json")]
    return sorted(read, key=lambda result: (result.date, result.name), reverse=True)


def page() -> str:
    intro = """# Benchmarks

Every table is made from a file in `docs/benchmarks/results`, which has the figures of every run. Engines
run in turns on the same machine. Figures hold for the machine and instruction level that stand beside them;
a shared virtual machine's speed drifts, so compare rows of one table, not of two.
"""
    return "\n".join([intro, *(result.markdown() for result in comparisons())])


def readme_result() -> Comparison:
    return next(result for result in comparisons() if result.name == README_RESULT)


def readme_with(result: Comparison) -> str:
    """Return the README's text with the table of ``result`` between the comments ``BEGIN`` and ``END``."""
    header = ["tokens/s", *(heading.replace(", tokens/s", "") for heading in result.columns.values())]
    rows = []
    for row in result.rows:
        label = ", ".join(str(row[key]) for key in reversed(result.labels))
        cells = [f"{statistics.median(row[key]):,.0f}" if row.get(key) else "" for key in result.columns]
        if row["engine"].startswith("Octavo"):
            label, cells = f"**{label}**", [cell and f"**{cell}**" for cell in cells]
        rows.append([label, *cells])
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    text = "\n".join([f"{result.title}: {result.machine}, {result.date}.", *result.notes])
    return f"{before}{BEGIN}{table(header, rows)}\n{text}\n{END}{after}"
