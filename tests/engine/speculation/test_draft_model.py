from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import recurrent_models
import tiny_models
from draft_checks import (
    FORMS,
    Cores,
    Drafts,
    essence,
    planned_pages,
    random_params,
    random_prompts,
    request_of,
    serve_and_cancel,
)
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.build import build_core
from octavo.engine.executor.load.loader import observe_caches
from octavo.engine.frontend.llm import LLM
from octavo.engine.memory.planner import plan, render
from octavo.engine.speculation.draft_model import DraftModel

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("every_draft_is_computed")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mistral"
    return tiny_models.make_model(folder, "mistral", num_hidden_layers=2)


def config_of(folder: Path, draft: Path, **settings: Any) -> EngineConfig:
    small: dict[str, Any] = {"page_size": 8, "num_pages": 60, "max_running": 6, "max_step_tokens": 48}
    small |= {"backend": "cpu"}
    return EngineConfig(model=str(folder), speculate=f"draft:{draft}", **(small | settings))


def check(folder: Path, draft: Path, *, seeds: range = range(2), **settings: Any) -> tuple[int, int]:
    watched, cores = Drafts(), Cores()
    with LLM(config_of(folder, draft, **settings), observer=watched, core_factory=cores) as llm:
        for seed in seeds:
            rng = random.Random(seed)
            prompts = random_prompts(rng, 10)
            params = [random_params(rng) for _ in prompts]
            params = [
                replace(each, structured=rng.choice(FORMS)) if rng.random() < 0.2 else each for each in params
            ]
            without = [replace(each, speculate="off") for each in params]
            plain = list(map(essence, llm.generate(prompts, without, progress=False)))
            assert list(map(essence, llm.generate(prompts, params, progress=False))) == plain
            cores.check()
    return watched.num_accepted, watched.num_rejected


def test_the_model_itself_guesses_all_of_it(folder: Path) -> None:
    accepted, rejected = check(folder, folder)
    assert accepted > 400
    assert accepted > 4 * rejected


def test_a_model_that_is_wrong_changes_nothing(folder: Path, windowed: Path) -> None:
    accepted, rejected = check(folder, windowed, kv_format="int8")
    assert rejected > 200
    assert rejected > 4 * accepted


@pytest.mark.slow
def test_a_model_with_recurrent_layers_is_guessed_for(tmp_path: Path, folder: Path) -> None:
    recurrent = recurrent_models.make_folder(tmp_path / "qwen3_5", "qwen3_5", mx.bfloat16)
    _, rejected = check(recurrent, folder, seeds=range(1))
    assert rejected > 100


def test_a_model_with_recurrent_layers_guesses(tmp_path: Path) -> None:
    itself, other = (
        recurrent_models.make_folder(tmp_path / name, name, mx.bfloat16) for name in ("qwen3_5", "lfm2")
    )
    accepted, rejected = check(itself, itself, seeds=range(1))
    assert accepted > 100
    assert accepted > 4 * rejected
    _, rejected = check(itself, other, seeds=range(1), max_step_tokens=12)
    assert rejected > 100


@pytest.mark.slow
def test_without_a_slot_a_model_with_recurrent_layers_guesses_less(folder: Path, tmp_path: Path) -> None:
    recurrent = recurrent_models.make_folder(tmp_path / "lfm2", "lfm2", mx.bfloat16)
    assert serve_and_cancel(config_of(folder, recurrent, num_pages=40)) > 5
    assert serve_and_cancel(config_of(recurrent, recurrent, num_pages=40, max_step_tokens=12)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_windows_and_other_formats(folder: Path, windowed: Path, backend: str) -> None:
    quick = backend == "cpu"
    for kv_format in ("bf16", "fp4", "fp5/fp4") if quick else ("fp4",):
        for pair in ((folder, windowed), (windowed, folder), (windowed, windowed))[: 3 if quick else 1]:
            check(*pair, backend=backend, kv_format=kv_format, seeds=range(4 if quick else 1))


def test_cancelled_requests_give_the_draft_models_pages_back(folder: Path, windowed: Path) -> None:
    assert serve_and_cancel(config_of(folder, windowed, num_pages=30)) > 10


def test_pages_of_sequences_without_drafts_are_reused(folder: Path) -> None:
    cores = Cores()
    core = cores(config_of(folder, folder, num_pages=200, prefix_cache=False))
    try:
        assert core.drafts.model is not None
        blocks = core.drafts.model.blocks
        taken = [blocks.open([1]) for _ in range(2)]
        assert blocks.reserve(taken[0], 8 * (blocks.num_idle - 6))
        for number in range(4):
            core.add(request_of(core, number, [number] * 20, SamplingParams(max_tokens=24, ignore_eos=True)))
        done = []
        while core.has_work:
            done += [update.delta.finish_reason for update in core.step() if update.delta.finish_reason]
            blocks.check()
        assert [reason.value for reason in done] == ["length"] * 4
        for table in taken:
            blocks.close(table)
        cores.check()
    finally:
        core.close()


def test_kv_memory_pays_for_the_draft_models_pages(folder: Path, windowed: Path) -> None:
    memory, cores = 2_000_000, Cores()
    settings: dict[str, Any] = {"num_pages": None, "kv_memory": memory}
    core = cores(replace(config_of(folder, windowed, **settings), speculate="off"))
    alone, limit = core.info.num_pages, mx.set_cache_limit(2**30)
    mx.set_cache_limit(limit)
    core.close()
    core = cores(config_of(folder, windowed, **settings))
    try:
        assert isinstance(core.drafts.model, DraftModel)
        drafter = core.drafts.model._runner.info
        assert drafter.num_pages == core.info.num_pages < alone
        budget = core.info.memory
        assert budget.drafts == drafter.memory.pages
        page = (budget.pages + budget.drafts) / core.info.num_pages
        assert memory - 3 * page < budget.pages + budget.drafts <= memory
        assert mx.set_cache_limit(limit) == limit
    finally:
        core.close()


AS_PLANNED: dict[str, Any] = {"max_running": 64, "max_step_tokens": 512}


@pytest.mark.parametrize("is_recurrent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_plans_count_the_memory_of_the_draft_model(
    folder: Path, tmp_path: Path, *, is_recurrent: bool
) -> None:
    cores = Cores()
    draft = recurrent_models.make_folder(tmp_path / "qwen3_5", "qwen3_5") if is_recurrent else folder
    config = config_of(
        folder, draft, num_pages=None, kv_memory=3_000_000, max_running=64, max_step_tokens=512
    )
    core = cores(config)
    try:
        assert planned_pages(config, 3_000_000) == core.info.num_pages
        assert planned_pages(replace(config, speculate="off"), 3_000_000) > 1.2 * core.info.num_pages
        if is_recurrent:
            return
        weights = core.info.memory.weights
    finally:
        core.close()
    found = plan(model=config.model, memory=2**30, speculate=config.speculate, observe=observe_caches)
    assert found["draft_weights_bytes"] == found["weights_bytes"]
    assert found["weights_bytes"] <= weights < 1.02 * found["weights_bytes"]
    assert "draft model" in render(found)


def test_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tiny_models.make_model(tmp_path / "other", "qwen3")
    path = other / "tokenizer.json"
    written = json.loads(path.read_text())
    vocab = written["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(written))
    with pytest.raises(
        InvalidConfig, match=r"must have the vocabulary of.* 64 is 'b' and not 'a'; choose a draft model with"
    ):
        build_core(config_of(folder, other))


def test_settings_that_name_no_model_are_refused(folder: Path) -> None:
    for speculate in ("draft", "draft:", "medusa"):
        with pytest.raises(InvalidConfig, match="must be auto, off, ngram, suffix, mtp or draft:PATH"):
            EngineConfig(model=str(folder), speculate=speculate)
