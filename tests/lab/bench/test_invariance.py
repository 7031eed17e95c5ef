from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import recurrent_models
import tiny_adapters
from octavo.engine.api.config import EngineConfig
from octavo.engine.cli import main
from octavo.engine.executor.native.linear import NativeEmbedding
from octavo.engine.executor.sampling.sampler import SampleState
from octavo.engine.memory.model_files import resolve_model
from octavo_lab.bench import invariance
from tiny_models import make_model


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", "invariance", *flags, "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.usefixtures("every_draft_is_computed")
@pytest.mark.parametrize(
    "adapters", [(), pytest.param(("a", "b"), marks=pytest.mark.slow)], ids=["base", "adapters"]
)
def test_nothing_differs(
    adapters: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--weights", "int4", "--kv-format", "fp5/fp4", "--residual-pages", "1"]
    for rank, name in enumerate(adapters, 4):
        tiny_adapters.make_adapter(tmp_path / name, resolve_model("demo"), rank=rank, seed=rank)
        flags += ["--lora-modules", f"{name}={tmp_path / name}"]
    code, result = run(capsys, *flags)
    assert result["adapters"] == list(adapters)
    assert (code, result["different"], result["not_reached"]) == (0, 0, []), result
    assert result["cases"] >= 24
    assert result.keys() >= {"bench", "model", "backend", "cases", "different"}


def test_a_kernel_that_sums_in_another_order_for_some_row_counts_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = NativeEmbedding.as_linear

    def wrong(self: NativeEmbedding, x: mx.array) -> mx.array:
        if x.shape[0] <= 3:
            return right(self, x)
        first = mx.arange(x.shape[-1]) < x.shape[-1] // 2
        nothing = mx.zeros_like(x)
        return right(self, mx.where(first, x, nothing)) + right(self, mx.where(first, nothing, x))

    monkeypatch.setattr(NativeEmbedding, "as_linear", wrong)
    code = main(["bench", "invariance", "--mates", "8", "--json"])
    said = capsys.readouterr()
    if code == 2:
        assert "a sequence's results change by" in said.err
        return
    result = json.loads(said.out.splitlines()[-1])
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
@pytest.mark.usefixtures("every_draft_is_computed")
@pytest.mark.parametrize(
    ("weights", "pages"), list(zip(invariance.FULL_WEIGHTS, invariance.FULL_FORMATS, strict=True)), ids=str
)
def test_all_formats_of_weights_and_pages(weights: Any, pages: dict[str, Any]) -> None:
    report, _ = invariance.compare(EngineConfig(weights=weights, **pages))
    assert (report.different, report.not_reached) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss", "deepseek_v3"])
def test_architectures(architecture: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / architecture, architecture)
    config = EngineConfig(model=str(folder), kv_format="fp4", residual_pages=1)
    report, _ = invariance.compare(config)
    assert (report.different, report.cases > 0) == ([], True)


RECURRENT = ("qwen3_next", "jamba", "rwkv7", "recurrent_gemma")
"""Gated delta with a convolution, scans, wkv7, RG-LRU."""


@pytest.mark.slow
@pytest.mark.usefixtures("every_draft_is_computed")
@pytest.mark.parametrize("architecture", RECURRENT)
def test_recurrent_architectures(architecture: str, tmp_path: Path) -> None:
    folder = recurrent_models.make_folder(tmp_path / architecture, architecture)
    report, _ = invariance.compare(EngineConfig(model=str(folder), kv_format="fp4"), num_mates=8)
    assert report.different == []
    others = {"preempted"} if architecture == "recurrent_gemma" else set()
    assert set(report.not_reached) <= others


@pytest.mark.usefixtures("every_draft_is_computed")
@pytest.mark.slow
def test_drafts_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SampleState, "after", lambda self, _tokens: self)
    wrong = invariance.compare(EngineConfig(), num_mates=0)[0]
    assert {difference.case for difference in wrong.different} == {"with drafts"}
