"""What several files of tests of the engine run on."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

import pytest

import tiny_models
from octavo.engine.executor.adapt import overrides, softcap
from octavo.engine.speculation import drafting


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def unadapted_gear(monkeypatch: pytest.MonkeyPatch) -> None:
    """gear as mlx-lm has it: it computes with K and V itself, so that they have to be gathered."""
    module = importlib.import_module(softcap.GEAR)
    plain = overrides.original(softcap.GEAR, "_softcap_attention")
    monkeypatch.setattr(module, "_softcap_attention", plain)
    monkeypatch.setattr(softcap, "GEAR", "no such module")


@pytest.fixture
def every_draft_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it pays or not."""

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
