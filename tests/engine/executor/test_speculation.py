from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from draft_checks import FORMS, Drafts, essence, random_params, random_prompts
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams, Speculate
from octavo.engine.api.stats import Observer
from octavo.engine.frontend.llm import LLM

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("every_draft_is_computed")]


def answers(llm: LLM, seed: int, count: int, speculate: Speculate) -> list[Any]:
    rng = random.Random(seed)
    prompts = random_prompts(rng, count)
    params = [replace(random_params(rng), speculate=speculate) for _ in prompts]
    return list(map(essence, llm.generate(prompts, params, progress=False)))


def engine(folder: Path, observer: Observer | None = None, **settings: Any) -> LLM:
    settings = {"page_size": 8, "num_pages": 60, "max_running": 6, "max_step_tokens": 48} | settings
    return LLM(EngineConfig(model=str(folder), **settings), observer=observer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def check(
    folder: Path, *, seeds: range, count: int, drafters: tuple[Speculate, ...] = ("ngram",), **settings: Any
) -> None:
    watched = Drafts()
    with engine(folder, watched, **settings) as llm:
        for seed in seeds:
            plain = answers(llm, seed, count, "off")
            assert not (watched.num_accepted or watched.num_rejected) or seed > seeds[0]
            for drafter in drafters:
                assert answers(llm, seed, count, drafter) == plain, drafter
    assert watched.num_accepted + watched.num_rejected > 10
    assert watched.num_accepted > 0


@pytest.mark.slow
def test_drafts_change_nothing_on_mlx_operations(folder: Path) -> None:
    check(folder, seeds=range(2), count=10, drafters=("ngram", "suffix"), backend="reference")


@pytest.mark.usefixtures("every_draft_is_computed")
def test_outputs_of_others_of_the_tenant_are_drafted(folder: Path) -> None:
    watched = Drafts()
    params = SamplingParams(max_tokens=40, temperature=1.5, seed=7, speculate="suffix", ignore_eos=True)
    with engine(folder, watched) as llm:
        first = llm.generate([[1, 2, 3, 4]], params, progress=False)
        before = watched.num_accepted
        second = llm.generate([[1, 2, 3, 4]], params, progress=False)
        assert list(map(essence, second)) == list(map(essence, first))
        assert watched.num_accepted - before >= 30
        params = replace(params, speculate="ngram")
        before = watched.num_accepted
        llm.generate([[1, 2, 3, 4]], params, progress=False)
        assert watched.num_accepted - before < 15, "it looks at its own sequence only"


@pytest.mark.parametrize("settings", [
    {"kv_format": "fp5/fp4", "residual_pages": 1, "sink_pages": 1, "num_pages": 80},
    {"kv_format": "int8", "weights": "int4"},
], ids=["residual", "int4 weights"])  # fmt: skip
def test_drafts_change_nothing_of_quantized_pages(folder: Path, settings: dict[str, Any]) -> None:
    check(folder, seeds=range(2), count=8, backend="cpu", **settings)


def structured_answers(llm: LLM, seed: int, count: int, speculate: Speculate) -> list[Any]:
    rng = random.Random(seed)
    prompts = random_prompts(rng, count)
    params = [
        replace(random_params(rng), structured=rng.choice(FORMS), max_tokens=60, speculate=speculate)
        for _ in prompts
    ]
    return list(map(essence, llm.generate(prompts, params, progress=False)))


def test_drafts_change_nothing_under_a_grammar(folder: Path) -> None:
    watched = Drafts()
    with engine(folder, watched, backend="cpu") as llm:
        for seed in range(2):
            plain = structured_answers(llm, seed, 10, "off")
            assert structured_answers(llm, seed, 10, "ngram") == plain
    assert watched.num_accepted > 100
    assert watched.num_accepted > watched.num_rejected
