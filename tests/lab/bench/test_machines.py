from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import astuple
from pathlib import Path

import pytest

from octavo_lab.bench import machines
from octavo_lab.bench.machines import RouterCost, Traffic

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
RESULTS = DOCS / "benchmarks" / "results"


def test_tokens_wait_longer_the_more_workers_there_are() -> None:
    cost = RouterCost(request_s=1e-3, prompt_token_s=1e-6, output_token_s=1e-4, idle=0.0, idle_worker=1e-4)
    traffic = Traffic(prompt_tokens=1000, output_tokens=100, tokens_per_s=100)
    assert machines.busy_cores(cost, traffic, 75) == pytest.approx(75 * (0.002 + 100 * 1e-4 + 1e-4))
    delays = [machines.token_delays(cost, traffic, count, 1) for count in (1, 30, 75, 83)]
    assert delays[3] is None
    p99 = [each["p99"] for each in delays if each is not None]
    assert cost.output_token_s <= p99[0] < p99[1] < p99[2]


def test_costs_of_the_router_are_the_measured_medians() -> None:
    one, three = json.loads((RESULTS / "2026-11-30-router-cost.json").read_text())["rows"]
    assert (one["workers"], three["workers"]) == ("1", "3")
    idle = [statistics.median(row["idle"]) for row in (one, three)]
    cost, per_worker = machines.ROUTER, (idle[1] - idle[0]) / 2
    medians = [
        *(statistics.median(one[key] + three[key]) for key in ("request", "prompt_token", "output_token")),
        idle[0] - per_worker,
        per_worker,
    ]
    assert medians == pytest.approx([1e6 * seconds for seconds in astuple(cost)])


def test_steps_of_a_cpu_are_the_measured_medians() -> None:
    rows = json.loads((RESULTS / "2026-11-26-peers.json").read_text())["rows"]
    (row,) = (row for row in rows if row["engine"] == "Octavo" and row["weights"] == "4 bits")
    measured = {rows: statistics.median(row[f"decode_{rows}"]) for rows in (1, 8, 32)}
    assert measured == machines.CPU_TOKENS_PER_S


def test_the_page_has_the_tables_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    machines.add_arguments(parser)
    result = machines.run(parser.parse_args([]))
    assert json.loads(json.dumps(result)) == result
    page = (DOCS / "design" / "several-machines.md").read_text()
    for table in capsys.readouterr().out.strip().split("\n\n"):
        assert table in page
