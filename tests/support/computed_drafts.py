from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.engine.speculation import drafting


@pytest.fixture
def every_draft_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_every_draft(monkeypatch)


def compute_every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_them(acceptance: float, *, max_drafts: int, cost: float, others: int) -> int:
        assert 0 <= acceptance <= 1
        assert cost >= 0
        assert others >= 0
        return max_drafts

    def everybodys(
        acceptances: Sequence[Sequence[float]], plain: int, ratios: Sequence[tuple[int, float]], **_: float
    ) -> list[int]:
        assert len(acceptances) <= plain
        assert all(rates and 0 <= min(rates) <= max(rates) <= 1 for rates in acceptances)
        assert all(ratio >= 1 for _, ratio in ratios)
        return [len(rates) for rates in acceptances]

    def any_gains(plain: int, ratios: Sequence[tuple[int, float]]) -> float:
        assert plain > 0
        assert ratios
        return 0.0

    monkeypatch.setattr(drafting, "num_drafts", all_of_them)
    monkeypatch.setattr(drafting, "allocate", everybodys)
    monkeypatch.setattr(drafting, "min_acceptance", any_gains)
