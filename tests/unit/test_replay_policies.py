"""Eviction policies: what each gives up first, by hand; and that learning pays where it should."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.block_manager import BlockManager, Digest, PageId
from octavo.block_manager.policies import POLICIES, make_policy
from octavo.block_manager.policy_gittins import AGES, NUM_AGES, WIDTHS, gittins_index
from octavo.engine.cli import main
from octavo.engine.replay.compare import OPTIMUM, SIZES, compare, render
from octavo.engine.replay.run import replay
from octavo.engine.replay.trace import TraceRequest, read_trace
from octavo.engine.replay.workloads import WORKLOADS

EXCERPT = Path(__file__).parents[1] / "data" / "conversation_trace_500.jsonl"


def ids(*pages: int) -> list[PageId]:
    return [PageId(page) for page in pages]


def digests(num_pages: int) -> list[Digest | None]:
    return [Digest(bytes([page])) for page in range(num_pages)]


@pytest.mark.parametrize("name", POLICIES)
def test_what_was_never_found_goes_in_the_order_of_release(name: str) -> None:
    policy = make_policy(name, 6)
    policy.release(ids(3, 2), digests(6))
    policy.release(ids(5, 0), digests(6))
    assert sorted(policy) == ids(0, 2, 3, 5)
    tails_first = name == "gittins"
    assert policy.evict(3) == (ids(3, 5, 2) if tails_first else ids(3, 2, 5))
    assert (len(policy), list(policy)) == (1, ids(0))


@pytest.mark.parametrize("name", POLICIES)
def test_a_page_that_is_held_is_not_evicted(name: str) -> None:
    policy = make_policy(name, 3)
    policy.release(ids(2, 1, 0), digests(3))
    policy.reuse(ids(0, 2))
    assert list(policy) == ids(1)
    policy.release(ids(2), digests(3))
    assert sorted(policy.evict(2)) == ids(1, 2)
    assert not len(policy)


@pytest.mark.parametrize("name", ["lfu", "gittins"])
def test_what_was_found_outlives_what_was_not(name: str) -> None:
    policy = make_policy(name, 4)
    policy.release(ids(0), digests(4))
    policy.reuse(ids(0))
    policy.release(ids(0), digests(4))
    policy.release(ids(3, 2, 1), digests(4))
    assert policy.evict(3) == ids(3, 2, 1)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=60), st.sampled_from([*POLICIES]))
def test_every_policy_lists_exactly_the_idle_pages(moves: list[tuple[bool, int]], name: str) -> None:
    policy, held, idle = make_policy(name, 8), set(ids(*range(8))), set[PageId]()
    rng = random.Random(len(moves))
    for frees, count in moves:
        if frees and held:
            pages = rng.sample(sorted(held), min(count, len(held)))
            policy.release(pages, digests(8))
            held -= set(pages)
            idle |= set(pages)
        elif idle:
            num_pages = min(count, len(idle))
            if num_pages % 2:
                pages = rng.sample(sorted(idle), num_pages)
                policy.reuse(pages)
            else:
                pages = policy.evict(num_pages)
            held |= set(pages)
            idle -= set(pages)
        assert sorted(policy) == sorted(idle)
        assert len(policy) == len(idle)


@given(st.lists(st.floats(0, 1 / NUM_AGES), min_size=NUM_AGES, max_size=NUM_AGES))
def test_the_index_is_the_best_horizon(chances: list[float]) -> None:
    left = [1 - sum(chances[:age]) for age in range(NUM_AGES + 1)]
    lasting = [width * (a + b) / 2 for width, (a, b) in zip(WIDTHS, itertools.pairwise(left), strict=True)]
    for age, index in enumerate(gittins_index(chances)):
        horizons = range(age + 1, NUM_AGES + 1)
        best = max(sum(chances[age:end]) / max(sum(lasting[age:end]), 1e-12) for end in horizons)
        assert index == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert len(AGES) == NUM_AGES


def test_learning_finds_more_than_recency_in_a_small_pool() -> None:
    """Half of the traffic is never seen again, the other half returns after more than the pool holds."""
    fresh = itertools.count(1000)
    requests = []
    for turn in range(1500):
        regular = [turn % 60, *range(100 * (turn % 60) + 10**6, 100 * (turn % 60) + 10**6 + 4)]
        requests += [
            TraceRequest(turn, 1, regular),
            TraceRequest(turn, 1, [10**9, *itertools.islice(fresh, 10)]),
        ]
    hits = {policy: replay(requests, 200, policy=policy).hit_pages for policy in POLICIES}
    assert hits["gittins"] > 2 * hits["lru"]


def test_the_comparison_shows_every_policy_below_the_optimum() -> None:
    rows = compare({"excerpt": read_trace(EXCERPT)}, sizes=(1000, 3000))
    for row in rows:
        assert set(row.hit_ratios) == {*POLICIES, OPTIMUM}
        assert max(row.hit_ratios.values()) == row.hit_ratios[OPTIMUM]
    assert all(name in render(rows) for name in ("excerpt", "gittins", OPTIMUM))


def test_the_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    requests = WORKLOADS[name]()
    assert requests[:50] == WORKLOADS[name]()[:50]
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in itertools.pairwise(requests))
    assert 0.3 < replay(requests, None).hit_ratio < 1


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="'fifo'"):
        BlockManager(4, 4, policy="fifo")
