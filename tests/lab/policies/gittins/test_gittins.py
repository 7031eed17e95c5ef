from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.block_manager.hit_statistics import AGES, NUM_AGES, WIDTHS, gittins_index
from octavo_lab.policies.gittins.shadow_lru import MARGIN, SLACK, ShadowLRU


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


class Pool:
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
        pool.request(page % 15, found=False)
        assert pool.recency.follow_lru == (pool.time < 22), "until twice the time it took to fill the pool"
    for number in range(30):
        pool.request(100 + number % 2, found=False)
        if pool.recency.follow_lru:
            break
    assert number == 2 + int(10 * SLACK + MARGIN * pool.time), "one loss more than it may have"
    for page in range(2000):
        pool.request(1000 + page, found=False)
    assert not pool.recency.follow_lru, "it never gets another chance"


def test_gittins_gains_more_hits_over_lru_than_it_loses() -> None:
    pool = Pool()
    for page in range(60):
        pool.request(page % 15, found=True)
    for number in range(30):
        pool.request(100 + number % 2, found=False)
    assert not pool.recency.follow_lru
