from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.engine.speculation import drafting


@pytest.fixture
def every_draft_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_them(hold: float, *, most: int, cost: float, others: int) -> int:
        assert 0 <= hold <= 1
        assert cost >= 0
        assert others >= 0
        return most

    def everybodys(
        wishes: Sequence[Sequence[float]], plain: int, ratios: Sequence[tuple[int, float]], **_: float
    ) -> list[int]:
        assert len(wishes) <= plain
        assert all(holds and 0 <= min(holds) <= max(holds) <= 1 for holds in wishes)
        assert all(ratio >= 1 for _, ratio in ratios)
        return [len(holds) for holds in wishes]

    def any_gains(plain: int, ratios: Sequence[tuple[int, float]]) -> float:
        assert plain > 0
        assert ratios
        return 0.0

    monkeypatch.setattr(drafting, "num_drafts", all_of_them)
    monkeypatch.setattr(drafting, "allot", everybodys)
    monkeypatch.setattr(drafting, "least_hold", any_gains)
