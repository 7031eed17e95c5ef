from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

import tiny_heads
import tiny_models
from draft_checks import (
    FORMS,
    Cores,
    Drafts,
    essence,
    planned_pages,
    random_params,
    random_prompts,
    serve_and_cancel,
)
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.executor.load.load import load_paged_runner
from octavo.engine.frontend.llm import LLM
from tiny_runners import make_batch, state

pytestmark = pytest.mark.parity

ARCHITECTURES = (
    "glm4_moe",
    "qwen3_5",  # with recurrent layers
    pytest.param("qwen3_next", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", marks=pytest.mark.slow),  # 61 layers
)


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    small: dict[str, Any] = {"page_size": 8, "num_pages": 60, "max_running": 6, "max_step_tokens": 48}
    small |= {"backend": "cpu"}
    return EngineConfig(model=str(folder), speculate="mtp", **(small | settings))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("architecture", ["glm4_moe", "qwen3_5", "qwen3_next"])
@pytest.mark.few(3)
def test_the_head_is_numpys(tmp_path: Path, architecture: str, backend: str) -> None:
    folder = tiny_heads.make_model(tmp_path / architecture, architecture, dtype=mx.float32)
    runner = load_paged_runner(config_of(folder, backend=backend, kv_format="bf16"))
    try:
        assert runner.head is not None
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, 256, 12).tolist()
        hidden = rng.standard_normal((12, tiny_heads.DIM)).astype(np.float32)
        logits, outputs = tiny_heads.NumpyHead(folder)(tokens, hidden)
        pages = [3, 5]
        for first, stop in ((0, 7), (7, 11), (11, 12)):
            batch = make_batch([(tokens[first:stop], first, pages)], list(range(stop - first)))
            out = runner.head.run(batch, hidden[first:stop], [state()] * (stop - first))
            assert out.hidden is not None
            np.testing.assert_allclose(out.hidden, outputs[first:stop], atol=0.03 * outputs.std())
            for sampled, expected in zip(out.samples, logits[first:stop], strict=True):
                assert sampled.token is not None
                assert expected[sampled.token] > expected.max() - 0.05 * expected.std()
    finally:
        runner.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    top = tmp_path_factory.mktemp("heads")
    return {
        (name, agrees): tiny_heads.make_model(top / f"{name}-{agrees}", name, agrees=agrees)
        for name in ("glm4_moe", "qwen3_5", "qwen3_next", "deepseek_v3")
        for agrees in (False, True)
    }


def check(folder: Path, *, seeds: range = range(2), **settings: Any) -> tuple[int, int]:
    watched, cores = Drafts(), Cores()
    with LLM(config_of(folder, **settings), observer=watched, core_factory=cores) as llm:
        for seed in seeds:
            rng = random.Random(seed)
            prompts, params = random_prompts(rng, 8), [random_params(rng) for _ in range(8)]
            params[0] = replace(params[0], structured=rng.choice(FORMS))
            without = [replace(each, speculate="off") for each in params]
            plain = list(map(essence, llm.generate(prompts, without, progress=False)))
            assert list(map(essence, llm.generate(prompts, params, progress=False))) == plain
            cores.check()
    return watched.num_accepted, watched.num_rejected


@pytest.mark.usefixtures("every_draft_is_computed")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_head_that_agrees_guesses_nearly_all_of_it(
    folders: dict[tuple[str, bool], Path], architecture: str
) -> None:
    accepted, rejected = check(folders[architecture, True], seeds=range(1))
    assert accepted > 100
    assert accepted > 4 * rejected


@pytest.mark.usefixtures("every_draft_is_computed")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_head_that_is_wrong_changes_nothing(
    folders: dict[tuple[str, bool], Path], architecture: str
) -> None:
    settings: dict[str, Any] = {"num_pages": 30, "kv_format": "int8"}
    accepted, rejected = check(folders[architecture, False], seeds=range(1), **settings)
    assert rejected > 100
    assert rejected > accepted


@pytest.mark.usefixtures("every_draft_is_computed")
@pytest.mark.parametrize("architecture", ["glm4_moe", "qwen3_5"])
def test_cancelled_requests_give_the_heads_pages_back(
    folders: dict[tuple[str, bool], Path], architecture: str
) -> None:
    assert serve_and_cancel(config_of(folders[architecture, True], num_pages=30)) > 10


def test_kv_memory_pays_for_the_heads_pages(folders: dict[tuple[str, bool], Path]) -> None:
    runner = load_paged_runner(config_of(folders["glm4_moe", True], num_pages=None, kv_memory=600_000))
    try:
        assert runner.head is not None
        budget = runner.info.memory
        assert budget.drafts == sum(pages.nbytes for pages in runner.head.paged.kv_cache.storages)
        assert budget.pages == 2 * budget.drafts
        assert 590_000 < budget.pages + budget.drafts <= 600_000
        assert runner.head.num_pages == runner.info.num_pages
        config = config_of(folders["glm4_moe", True])
        assert planned_pages(config, 600_000) == runner.info.num_pages
        assert planned_pages(replace(config, speculate="off"), 600_000) > 1.4 * runner.info.num_pages
    finally:
        runner.close()


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.make_model(tmp_path / "qwen3", "qwen3")
    with pytest.raises(
        InvalidConfig, match=r"needs a head for multi-token prediction, and .* has none; .*or"
    ):
        load_paged_runner(config_of(folder))


def test_half_a_head_is_refused(tmp_path: Path) -> None:
    folder = tiny_heads.make_model(tmp_path / "glm", "glm4_moe")
    path = str(folder / "model-head.safetensors")
    weights = cast("dict[str, mx.array]", mx.load(path))
    mx.eval(weights)
    del weights["model.layers.2.hnorm.weight"]
    mx.save_safetensors(path, weights)
    with pytest.raises(InvalidConfig, match=r"has no model\.layers\.2\.hnorm\.weight"):
        load_paged_runner(config_of(folder))
