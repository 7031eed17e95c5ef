from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from large_channels import with_large_channels
from octavo.engine import LLM, EngineConfig
from octavo.engine.api.config import CHOSEN_FROM
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.api.outputs import TokenLogprob
from octavo.engine.executor.batch import Batch
from octavo.engine.executor.load import load
from octavo.engine.executor.load.page_loss import MAX_TEXT, MIN_TOKENS, Scores, choose_format, divergence
from octavo.engine.executor.model_runner import PagedRunner


def scores(chance: float, length: int = MIN_TOKENS) -> list[TokenLogprob]:
    top = ((1, math.log(chance)), (2, math.log(0.99 - chance)))
    return [TokenLogprob(1, top[0][1], top)] * length


def test_divergence_is_that_of_two_distributions() -> None:
    base, other = scores(0.6), scores(0.5)
    by_hand = 0.6 * math.log(0.6 / 0.5) + 0.39 * math.log(0.39 / 0.49)
    assert divergence(base, other) == pytest.approx(by_hand)
    assert divergence(base, base) == 0
    assert divergence(base, []) == math.inf
    elsewhere = [TokenLogprob(7, 0.0, ((7, math.log(0.9)),))] * MIN_TOKENS
    assert divergence(base, elsewhere) > 10


@pytest.mark.parametrize(
    ("lossy", "refused", "chosen"),
    [
        ((), (), "fp4"),
        (("fp4",), (), "fp5/fp4"),
        (("fp4",), ("fp5/fp4",), "int8/fp4"),
        (CHOSEN_FROM, (), "bf16"),
    ],
)
def test_auto_is_the_smallest_format_that_loses_less_than_a_hundredth(
    lossy: tuple[str, ...], refused: tuple[str, ...], chosen: str
) -> None:
    def score(config: EngineConfig) -> Scores:
        if config.kv_format in refused:
            raise InvalidConfig("no such heads")
        return scores(0.3 if config.kv_format in lossy else 0.6)

    assert choose_format(EngineConfig(kv_format="auto"), score).kv_format == chosen
    assert choose_format(EngineConfig(kv_format="auto"), lambda _: scores(0.6, 3)).kv_format == "bf16"


@pytest.mark.parametrize("model", ["demo", "demo-hybrid"])
def test_auto_is_settled_before_the_pool_is_made(model: str) -> None:
    with LLM(EngineConfig(model=model, num_pages=32, kv_format="auto", sink_pages=1)) as llm:
        chosen = llm.info.kv_format
        assert chosen in (*CHOSEN_FROM, "bf16")
        assert model == "demo-hybrid" or chosen == "fp4"
        assert llm.info.residual_pages == (0 if chosen == "bf16" else 2)
        assert len(llm.generate(["Once there was"], progress=False)[0].outputs[0].token_ids) > 1


def test_scoring_takes_few_rows_at_once_and_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    submit, create = PagedRunner.submit, load._create_kv_cache

    def counted(runner: PagedRunner, batch: Batch, *rest: Any) -> Any:
        rows.append(len(batch.token_ids))
        return submit(runner, batch, *rest)

    def created(config: EngineConfig, *rest: Any) -> Any:
        if config.num_pages == 32:
            rows.append(-mx.get_cache_memory())
        return create(config, *rest)

    monkeypatch.setattr(PagedRunner, "submit", counted)
    monkeypatch.setattr(load, "_create_kv_cache", created)
    LLM(EngineConfig(num_pages=32, kv_format="fp4", backend="cpu")).close()
    *scored, cached = rows
    assert len(scored) > MAX_TEXT / load.SCORED_AT_ONCE
    assert max(scored) <= load.SCORED_AT_ONCE
    assert cached == 0


def test_a_model_with_large_channels_is_warned_of_and_gets_16_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large = str(with_large_channels(tmp_path / "large", 128.0))
    with LLM(EngineConfig(model=large, num_pages=32, kv_format="auto")) as llm:
        assert llm.info.kv_format == "int8/fp4"
    folder = str(with_large_channels(tmp_path / "model", 2048.0))
    with caplog.at_level(logging.WARNING, "octavo"):
        with LLM(EngineConfig(model=folder, num_pages=32, kv_format="auto")) as llm:
            assert llm.info.kv_format == "bf16"
        LLM(EngineConfig(model=folder, num_pages=32)).close()
        LLM(EngineConfig(num_pages=32, kv_format="fp4")).close()
        assert not caplog.records
        LLM(EngineConfig(model=folder, num_pages=32, kv_format="int8")).close()
    (record,) = caplog.records
    assert "kv_format int8 raises the perplexity" in record.getMessage()
    assert record.getMessage().endswith("use kv_format auto or bf16")
