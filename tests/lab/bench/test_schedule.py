from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.api.errors import InvalidRequest
from octavo_lab.bench import schedule as bench


def results(*options: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    found = bench.run(parser.parse_args(options))
    assert json.loads(json.dumps(found)) == found
    return dict(found["traffic"])


def test_a_flood_hardly_delays_another_tenant_under_fairness() -> None:
    orders = [option for order in ("fcfs", "vtc", "dlpm") for option in ("--order", order)]
    found = results("--traffic", "light", "--traffic", "flood", *orders)
    alone = found["light"]["fcfs"]["ttft_p95_s"]["light"]
    assert found["flood"]["fcfs"]["ttft_p95_s"]["light"] > 10 * alone, "first come, first served"
    for order in ("vtc", "dlpm"):
        assert found["flood"][order]["ttft_p95_s"]["light"] <= 2 * alone
        assert found["flood"][order]["tokens_per_s"] >= 0.99 * found["flood"]["fcfs"]["tokens_per_s"]


def test_deficits_keep_the_hits_of_the_longest_prefix() -> None:
    found = results("--traffic", "shared", "--order", "lpm", "--order", "dlpm", "--num-pages", "1024")
    hits = {order: figures["hit_ratio"] for order, figures in found["shared"].items()}
    assert hits["dlpm"] >= 0.97 * hits["lpm"]


def test_deadlines_keep_goodput_under_overload() -> None:
    options = ("--traffic", "overload", "--fairness", "off", "--target-itl", "500")
    without = results(*options)["overload"]["fcfs"]
    within = results(*options, "--target-ttft", "10")["overload"]["fcfs"]
    assert within["goodput_per_s"] > 3 * without["goodput_per_s"]
    assert within["tokens_per_s"] > 0.98 * without["tokens_per_s"]


@pytest.mark.slow
def test_targets_keep_the_goodput_of_rates_at_which_fixed_chunks_are_late() -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    options = ["--rates", "0.12,0.2", "--seeds", "2", "--good-itl", "0.2"]
    found = bench.run(parser.parse_args([*options, "--target-itl", "150", "--target-ttft", "10"]))
    knee, beyond = found["rates"]
    default, best = knee["fixed"][512], max(beyond["fixed"].values(), key=sum)
    for served, late in ((knee["targets"], default), (beyond["targets"], best)):
        assert sum(served) >= 1.5 * sum(late) > 0
    with pytest.raises(InvalidRequest, match="add --target-itl MS"):
        bench.run(parser.parse_args(options))


def test_swap_memory_saves_recomputation_if_copies_are_cheaper() -> None:
    options = ("--traffic", "growth", "--order", "fcfs", "--swap-pages", "4096")
    found = results(*options)["growth"]
    without, swapped = found["fcfs"], found["fcfs+swap"]
    assert min(without["preemptions"], swapped["preemptions"]) > 0
    assert without["pages_out"] == without["pages_in"] == 0
    assert 0 < swapped["pages_in"] <= swapped["pages_out"]
    needed = 64 * 3000
    assert without["computed_tokens"] > 1.2 * needed
    assert swapped["computed_tokens"] < 1.01 * needed
    assert swapped["tokens_per_s"] > 1.2 * without["tokens_per_s"]
    dear = results(*options, "--swap-page-ms", "1000")["growth"]["fcfs+swap"]
    assert dear["pages_in"] < 0.1 * swapped["pages_in"]


def test_a_trace_is_served(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * n, "input_length": 700, "output_length": 3, "hash_ids": [0, n], "who": n % 2}
        for n in range(6)
    ]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    found = results("--trace", str(trace), "--tenant-field", "who", "--order", "dlpm")["trace.jsonl"]["dlpm"]
    assert set(found["ttft_p95_s"]) == {"0", "1"}
    assert 0.3 < found["hit_ratio"] < 0.5
