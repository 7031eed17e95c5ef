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
from octavo.block_manager.hit_statistics import (
    AGES,
    NUM_AGES,
    WIDTHS,
    HitStatistics,
    gittins_index,
    kind_of,
)
from octavo.block_manager.policies import POLICIES, make_policy
from octavo.block_manager.policies.experimental.gittins.policy import Gittins
from octavo.block_manager.policies.experimental.gittins.shadow_lru import MARGIN, SLACK, ShadowLRU
from octavo.engine.cache_sim.compare import OPTIMUM, SIZES, compare, render
from octavo.engine.cache_sim.run import replay
from octavo.engine.cache_sim.trace import TraceRequest, read_trace
from octavo.engine.cache_sim.workloads import WORKLOADS
from octavo.engine.cli import main

EXCERPT = Path(__file__).parents[2] / "data" / "conversation_trace_500.jsonl"


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
    assert policy.evict(3) == ids(3, 2, 5)
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


def test_what_was_found_outlives_what_was_not() -> None:
    policy = make_policy("lfu", 4)
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


@given(st.lists(st.floats(0, 0.95), min_size=NUM_AGES, max_size=NUM_AGES))
def test_the_index_is_the_best_horizon(chances: list[float]) -> None:
    assert len(AGES) == len(WIDTHS) == NUM_AGES
    for age, index in enumerate(gittins_index(chances)):
        best = hits = time = 0.0
        left = 1.0
        for chance, width in zip(chances[age:], WIDTHS[age:], strict=True):
            hits += left * chance
            time += left * width * (1 - chance / 2)
            left *= 1 - chance
            best = max(best, hits / time)
        assert index == pytest.approx(best, rel=1e-6, abs=1e-12)


def test_a_kind_promises_what_was_seen_of_it() -> None:
    """Two kinds, one of which always comes back at the second age and the other never does."""
    returns = HitStatistics()
    first, second = (kind_of(uses=0, num_new=1, gap=gap) for gap in (1, 2))
    for kind in (first, second):
        returns.seen(kind).reached = [400.0] * NUM_AGES
    returns.seen(second).used[1] = 400.0
    returns.refresh(0)
    low, high = returns.indices(first), returns.indices(second)
    assert high[1] > 20 * low[1]
    assert high[1] == pytest.approx(1 / (WIDTHS[1] / 2), rel=0.1)
    more = returns.indices(kind_of(uses=1, num_new=1, gap=2))
    assert all(a >= b for a, b in zip(more, high, strict=True)), "more uses are worth less"


def test_a_head_outlives_a_tail_that_promises_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """New pages come back soon, and what was found before does not; yet they need it to be of any use."""
    worth = {True: [1.0] * NUM_AGES, False: [2.0] * NUM_AGES}
    monkeypatch.setattr(
        HitStatistics, "indices", lambda _self, kind: worth[kind >= kind_of(uses=1, num_new=0, gap=0)]
    )
    monkeypatch.setattr(ShadowLRU, "_should_follow", lambda _self: False)
    policy = Gittins(6, 6)
    policy.release(ids(0), digests(6))
    policy.reuse(ids(0))
    policy.release(ids(2, 1, 0), digests(6))
    policy.release(ids(5), digests(6))
    assert policy.evict(4) == ids(2, 1, 0, 5)


class Pool:
    """Requests of one page each, in a pool of ten."""

    def __init__(self) -> None:
        self.recency, self.time, self.window_start_at = ShadowLRU(10), 0, dict[int, int]()

    def request(self, page: int, *, found: bool) -> None:
        if page in self.window_start_at:
            self.recency.want(self.window_start_at[page], found=found)
        self.time += 1
        self.window_start_at[page] = self.time
        self.recency.release(1)


def test_a_policy_that_falls_behind_lru_follows_it_for_a_while() -> None:
    pool = Pool()
    for page in range(30):
        pool.request(page % 15, found=False)  # fifteen in turn, too many for LRU: nothing is lost
        assert pool.recency.follow_lru == (pool.time < 22), "until twice the time it took to fill the pool"
    for number in range(30):
        pool.request(100 + number % 2, found=False)  # two in turn, which LRU would have
        if pool.recency.follow_lru:
            break
    assert number == 2 + int(10 * SLACK + MARGIN * pool.time), "one loss more than it may have"
    for page in range(2000):
        pool.request(1000 + page, found=False)
    assert not pool.recency.follow_lru, "it never gets another chance"


def test_what_a_policy_finds_beyond_lru_makes_up_for_what_it_loses() -> None:
    pool = Pool()
    for page in range(60):
        pool.request(page % 15, found=True)
    for number in range(30):
        pool.request(100 + number % 2, found=False)
    assert not pool.recency.follow_lru


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
    requests = WORKLOADS[name](1)
    assert requests[:50] == WORKLOADS[name](1)[:50] != WORKLOADS[name](2)[:50]
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in itertools.pairwise(requests))
    assert 0.3 < replay(requests, None).hit_ratio < 1


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="'fifo'"):
        BlockManager(4, 4, policy="fifo")
