from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from octavo.block_manager.policies import POLICIES
from octavo.engine.cli import main
from octavo_lab.cache_sim.compare import OPTIMUM, SIZES, compare, render
from octavo_lab.cache_sim.run import replay
from octavo_lab.cache_sim.trace import read_trace
from octavo_lab.cache_sim.workloads import WORKLOADS

EXCERPT = Path(__file__).parents[2] / "data" / "conversation_trace_500.jsonl"


def test_the_comparison_shows_every_policy_below_the_optimum() -> None:
    rows = compare({"excerpt": read_trace(EXCERPT)}, sizes=(1000, 3000))
    for row in rows:
        assert set(row.hit_ratios) == {*POLICIES, OPTIMUM}
        assert max(row.hit_ratios.values()) == row.hit_ratios[OPTIMUM]
    assert all(name in render(rows) for name in ("excerpt", *POLICIES, OPTIMUM))


def test_the_plot_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    picture = tmp_path / "hits.png"
    assert main(["replay", str(EXCERPT), "--plot", str(picture), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out.splitlines()[-1])["compared"]
    assert [row["num_pages"] for row in compared] == list(SIZES)
    pixels = pyplot.imread(picture)
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 20, "an empty picture"
    assert main(["replay", str(EXCERPT), "--plot", str(tmp_path / "no" / "hits.png")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", WORKLOADS)
def test_made_up_traffic_is_the_same_every_time_and_has_something_to_find(name: str) -> None:
    requests = WORKLOADS[name](1)
    assert requests[:50] == WORKLOADS[name](1)[:50] != WORKLOADS[name](2)[:50]
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in itertools.pairwise(requests))
    assert 0.3 < replay(requests, None).hit_ratio < 1
