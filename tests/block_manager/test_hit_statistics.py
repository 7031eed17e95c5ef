from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.block_manager.hit_statistics import AGES, NUM_AGES, WIDTHS, gittins_index


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
