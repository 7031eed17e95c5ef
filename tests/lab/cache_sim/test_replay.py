from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.block_manager import RecurrentState
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.cli import main
from octavo_lab.cache_sim import states
from octavo_lab.cache_sim.optimum import optimal_hits
from octavo_lab.cache_sim.run import replay
from octavo_lab.cache_sim.states import ATTENTION, POLICIES, SIZES
from octavo_lab.cache_sim.trace import TraceRequest, read_trace
from octavo_lab.plots import figure
from prefix_caches import best_hits, lru_hits, min_hits

EXCERPT = Path(__file__).parents[2] / "data" / "conversation_trace_500.jsonl"

prompts = st.lists(st.lists(st.integers(0, 1), max_size=4), min_size=1, max_size=8)


def requests_of(chains: list[list[int]], output_tokens: int = 1, step_ms: float = 1.0) -> list[TraceRequest]:
    return [TraceRequest(i * step_ms, output_tokens, chain) for i, chain in enumerate(chains)]


@given(prompts, st.integers(1, 6))
def test_a_replay_agrees_with_a_small_cache_model(chains: list[list[int]], num_pages: int) -> None:
    replayed = replay(requests_of(chains), num_pages)
    assert replayed.hit_pages == lru_hits(chains, num_pages)
    assert replayed.skipped_requests == sum(len(chain) > num_pages for chain in chains)
    assert replayed.prompt_pages == sum(len(chain) for chain in chains if len(chain) <= num_pages)
    assert replayed.peak_pages <= num_pages


@given(prompts, st.integers(1, 5))
@settings(max_examples=100)
def test_the_bound_equals_the_best_choices(chains: list[list[int]], num_pages: int) -> None:
    bound = optimal_hits(requests_of(chains), num_pages)
    assert bound == best_hits(chains, num_pages) == min_hits(chains, num_pages)
    assert bound >= min_hits(chains, num_pages, tails_first=False)


def test_the_figures_of_the_excerpt() -> None:
    requests = read_trace(EXCERPT)
    everything = replay(requests, None)
    chains = [request.page_ids for request in requests]
    assert len(requests) == everything.requests == 500
    assert everything.prompt_pages == sum(map(len, chains))
    assert everything.hit_pages == everything.prompt_pages - len({i for chain in chains for i in chain})
    assert everything.evicted_pages == 0
    assert everything.peak_pages == everything.prompt_pages - everything.hit_pages
    small = replay(requests, 1000)
    assert small.hit_pages == lru_hits(chains, 1000)
    assert small.evicted_pages > 0
    assert small.hit_pages < optimal_hits(requests, 1000) < everything.hit_pages


GOOD: dict[str, Any] = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [7, "x"]}
BAD = {
    "not json": "{",
    "a list": "[1]",
    "no ids": json.dumps({key: value for key, value in GOOD.items() if key != "hash_ids"}),
    "ids that are none": json.dumps(GOOD | {"hash_ids": [1, 2.5]}),
    "too few ids": json.dumps(GOOD | {"hash_ids": [1]}),
    "no number": json.dumps(GOOD | {"timestamp": "noon"}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_broken_line_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + BAD[name] + "\n")
    with pytest.raises(InvalidRequest, match="line 2"):
        read_trace(path)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["replay", str(EXCERPT), "--num-pages", "1000", "--optimum", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = "requests prompt_pages hit_pages hit_ratio evicted_pages peak_pages pages_per_s skipped_requests"
    assert set(names.split()) <= set(result)
    assert result["hit_ratio"] == result["hit_pages"] / result["prompt_pages"]
    assert result["optimal_hit_pages"] > result["hit_pages"]
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    wrong = [
        [str(EXCERPT), "--num-pages", "0"],
        [str(empty)],
        [str(tmp_path)],
        [str(EXCERPT), "--page-size", "9"],
    ]
    for arguments in wrong:
        assert main(["replay", *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_with_space_for_all_states_hits_equal_those_of_attention() -> None:
    chains = [[1, 2, 3], [1, 2, 4], [1, 2, 4, 5], [1, 2, 6]]
    dense = RecurrentState(num_slots=30, slot_bytes=1, every_page=True)
    assert (
        replay(requests_of(chains), 20, states=dense).hit_pages == replay(requests_of(chains), 20).hit_pages
    )
    sparse = RecurrentState(num_slots=30, slot_bytes=1)
    assert replay(requests_of(chains), 20, states=sparse).hit_pages == 0 + 0 + 3 + 2


def test_states_share_the_bytes_of_the_pages(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-pages", "2000", "--page-bytes", "1MiB", "--state-bytes", "16MiB", "--json"]
    assert main(["replay", str(EXCERPT), *flags, "--state-share", "0.125,0.25,0.5"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["states"]
    assert {row["snapshots"] for row in rows} == {ATTENTION, *POLICIES}
    assert all(row["num_pages"] + 16 * row["num_slots"] <= 2000 for row in rows)
    best = {
        name: max(r["hit_ratio"] for r in rows if r["snapshots"] == name) for name in (ATTENTION, *POLICIES)
    }
    assert best["none"] == 0 < best["every page"] < best["tail"] < best["tail and junction"]
    assert all(row["of_attention"] == row["hit_ratio"] / best[ATTENTION] for row in rows)
    assert main(["replay", str(EXCERPT), "--state-bytes", "16MiB"]) == 2
    assert "add --page-bytes and --num-pages" in capsys.readouterr().err


def test_the_plot_by_bytes_has_a_line_per_snapshot_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    lines: list[str] = []

    @contextmanager
    def kept(path: Path, **options: Any) -> Iterator[list[Any]]:
        with figure.picture(path, **options) as axes:
            yield axes
            lines.extend(line.get_label() for line in axes[0].lines if len(line.get_xdata()) == len(SIZES))

    monkeypatch.setattr(states, "picture", kept)
    flags = ["--num-pages", "800", "--page-bytes", "1MiB", "--state-bytes", "4MiB", "--state-share", "0.25"]
    picture = tmp_path / "states.png"
    assert main(["replay", str(EXCERPT), *flags, "--plot", str(picture)]) == 0
    assert lines == ["attention alone", *POLICIES]
    assert picture.stat().st_size > 10_000
