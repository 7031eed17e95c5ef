from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import recurrent_models
from draft_checks import Drafts, essence, random_params, random_prompts, request_of
from native import require_extension
from octavo.engine import LLM
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams, Speculate
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("every_draft_is_computed")]

QUICK = ("qwen3_5", "falcon_h1", "rwkv7", "mamba")
OTHERS = (
    "recurrent_gemma", "qwen3_next", "kimi_linear", "mamba2", "jamba", "lfm2", "bailing_moe_linear",
    "nemotron_h",
)  # fmt: skip
"""Gated delta with either gate, SSD, scans, RG-LRU, wkv7, lightning attention, short convolutions."""

ON_REFERENCE = ("qwen3_5", "rwkv7")
"""Bits on the reference backend do not depend on other requests, unlike those of mlx-lm's SSD."""

DRAFTERS: tuple[Speculate, ...] = ("ngram", "suffix")
FEW_WORDS: dict[str, Any] = {
    "logit_bias": dict.fromkeys((1, 2, 3), 100.0), "temperature": 30.0, "top_k": 3, "top_p": 1.0, "min_p": 0,
}  # fmt: skip
"""Outputs of only three words, so that drafts are found but often rejected."""

ARCHITECTURES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


def config(folder: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "page_size": 8, "num_pages": 40, "max_running": 5, "max_step_tokens": 48, "max_model_len": 256,
        "state_memory": 2**21, "backend": "cpu",
    }  # fmt: skip
    return EngineConfig(model=str(folder), **settings | changes)


def answers(llm: LLM, seed: int, count: int, speculate: Speculate) -> list[Any]:
    rng = random.Random(seed)
    prompts = random_prompts(rng, count)
    params = [replace(random_params(rng), speculate=speculate) for _ in prompts]
    params[::2] = [replace(each, **FEW_WORDS) for each in params[::2]]
    return list(map(essence, llm.generate(prompts, params, progress=False)))


def check(folder: Path, watched: Drafts, *, count: int = 8, **settings: Any) -> None:
    with LLM(config(folder, **settings), observer=watched) as llm:
        plain = answers(llm, 0, count, "off")
        for drafter in DRAFTERS:
            assert answers(llm, 0, count, drafter) == plain, drafter


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.few(2)
def test_drafts_change_nothing(name: str, tmp_path: Path) -> None:
    require_extension()
    folder = recurrent_models.make_folder(tmp_path / name, name, mx.bfloat16)
    watched = Drafts()
    for size in (48, 9):
        check(folder, watched, max_step_tokens=size)
    assert watched.num_accepted > 0
    assert watched.num_rejected > 0


@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ON_REFERENCE)]
)
def test_drafts_change_nothing_if_mlx_lm_computes_states(name: str, tmp_path: Path) -> None:
    folder = recurrent_models.make_folder(tmp_path / name, name)
    watched = Drafts()
    check(folder, watched, backend="reference", count=6)
    assert watched.num_accepted > 0
    assert watched.num_rejected > 0


@pytest.mark.parametrize("every_page", [False, True])
@pytest.mark.few(1)
def test_states_after_wrong_drafts_are_never_found(tmp_path: Path, *, every_page: bool) -> None:
    require_extension()
    folder = recurrent_models.make_folder(
        tmp_path / "model", "lfm2" if every_page else "qwen3_5", mx.bfloat16
    )
    rng = random.Random(5)
    pieces = [[rng.randrange(250) for _ in range(7)] for _ in range(3)]
    first = [piece * 3 for piece in pieces]
    params = SamplingParams(max_tokens=24, seed=3, logprobs=1, ignore_eos=True, **FEW_WORDS)
    with LLM(config(folder, prefix_cache=False)) as llm:
        said = [each.outputs[0].token_ids for each in llm.generate(first, params, progress=False)]
        turns = [[*prompt, *tokens, *pieces[0]] for prompt, tokens in zip(first, said, strict=True)]
        prompts = [*first, *turns]
        wanted = [each.outputs[0] for each in llm.generate(prompts, params, progress=False)]
    cold = [(list(each.token_ids), list(each.logprobs)) for each in wanted]
    watched = Drafts()
    core = build_core(config(folder, num_pages=24, page_size=4, speculate="suffix"), watched)
    try:
        states = core._blocks.states
        assert states is not None
        assert states.every_page == every_page
        hits = sum(serve(core, prompts, cold, params, rng) for _ in range(6))
        assert core.gauges.states is not None
        assert core.gauges.states.held == 0
    finally:
        core.close()
    assert hits > 0
    assert watched.num_accepted > 0
    assert watched.num_rejected > 0


def serve(
    core: EngineCore, prompts: list[list[int]], cold: list[Any], params: SamplingParams, rng: random.Random
) -> int:
    requests = [
        request_of(core, number, prompts[number % len(prompts)], params) for number in range(2 * len(prompts))
    ]
    said: dict[str, tuple[list[int], list[Any]]] = {request.request_id: ([], []) for request in requests}
    waiting = rng.sample(requests, len(requests))
    while waiting or core.has_work:
        while waiting and rng.random() < 0.4:
            core.add(waiting.pop())
        if rng.random() < 0.05:
            core.abort(rng.choice(requests))
        for request, delta in core.step():
            said[request.request_id][0].extend(delta.token_ids)
            said[request.request_id][1].extend(delta.logprobs)
            assert delta.finish_reason is not FinishReason.ERROR
        core._blocks.check()
    for number, request in enumerate(requests):
        tokens, logprobs = said[request.request_id]
        whole_tokens, whole_logprobs = cold[number % len(prompts)]
        assert tokens == whole_tokens[: len(tokens)]
        assert logprobs == whole_logprobs[: len(logprobs)]
    return sum((request.samples[0].sequence.history.num_cached or 0) > 0 for request in requests)
