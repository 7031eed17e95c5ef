"""``octavo bench invariance``: nothing differs, and a kernel that sums in another order is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from octavo.engine.api.config import EngineConfig
from octavo.engine.bench import invariance
from octavo.engine.cli import main
from octavo.engine.executor.native.linear import NativeEmbedding
from tiny_models import make_model


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", "invariance", *flags, "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_nothing_differs(capsys: pytest.CaptureFixture[str]) -> None:
    code, result = run(capsys, "--weights", "int4", "--kv-format", "fp5/fp4", "--residual-pages", "1")
    assert (code, result["different"], result["not_reached"]) == (0, 0, []), result
    assert result["cases"] >= 24
    assert result.keys() >= {"bench", "model", "backend", "cases", "different"}


def test_a_kernel_that_sums_in_another_order_for_some_row_counts_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output head of the embedded model, in two halves for more than three rows."""
    right = NativeEmbedding.as_linear

    def wrong(self: NativeEmbedding, x: mx.array) -> mx.array:
        if x.shape[0] <= 3:
            return right(self, x)
        first = mx.arange(x.shape[-1]) < x.shape[-1] // 2
        nothing = mx.zeros_like(x)
        return right(self, mx.where(first, x, nothing)) + right(self, mx.where(first, nothing, x))

    monkeypatch.setattr(NativeEmbedding, "as_linear", wrong)
    code, result = run(capsys, "--mates", "8")
    assert code == 1
    assert result["different"] > 0
    assert any("among 8" in line for line in result["differences"])
    assert not any("from the prefix cache" in line for line in result["differences"]), (
        "served alone: few rows"
    )


def test_first_difference() -> None:
    a = ((1, 2, 3), ("x", "y", "z"))
    assert invariance.first_difference(a, a) is None
    assert invariance.first_difference(a, ((1, 2, 3), ("x", "Y", "z"))) == 1
    assert invariance.first_difference(a, ((1, 2, 4), ("x", "y", "z"))) == 2
    assert invariance.first_difference(a, ((1, 2), ("x", "y"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("weights", invariance.FULL_WEIGHTS)
@pytest.mark.parametrize("pages", invariance.FULL_FORMATS, ids=str)
def test_the_whole_matrix(weights: Any, pages: dict[str, Any]) -> None:
    report, _ = invariance.compare(EngineConfig(weights=weights, **pages))
    assert (report.different, report.not_reached) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_moe", "gpt_oss", "olmo2"])
def test_architectures(architecture: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / architecture, architecture)
    config = EngineConfig(model=str(folder), kv_format="fp4", residual_pages=1)
    report, _ = invariance.compare(config)
    assert (report.different, report.cases > 0) == ([], True)
