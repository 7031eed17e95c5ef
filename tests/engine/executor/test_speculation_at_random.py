"""Random requests, first without drafts, then with drafts of all kinds.

Outputs must be equal to the bit; outputs of cancelled requests must be prefixes."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx
import pytest

import tiny_models
from draft_checks import FORMS, random_params, random_prompts
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.request import Request
from octavo.engine.structured_output.compiler import ConstraintCompiler

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("every_draft_is_computed")]

ARCHITECTURES = ("llama", "qwen3", "mistral", "gemma3_text", "gpt_oss")
FORMATS = ("bf16", "fp16", "int8", "int4", "fp4", "fp5/fp4")
PER_ROUND = 50


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    error: str | None = None


def random_config(rng: random.Random, folder: Path, draft: Path, backend: str) -> EngineConfig:
    kv_format = rng.choice(FORMATS)
    residual = rng.choice([0, 0, 1]) if kv_format not in ("bf16", "fp16") else 0
    return EngineConfig(
        model=str(folder),
        backend=backend,  # type: ignore[arg-type]
        kv_format=kv_format,
        residual_pages=residual,
        page_size=rng.choice([8, 16]),
        num_pages=rng.choice([14, 20, 60]),
        max_running=rng.choice([4, 8, 16]),
        max_step_tokens=rng.choice([16, 48, 128]),
        prefix_cache=rng.random() < 0.8,
        speculate=f"draft:{draft}",
        async_steps=backend == "cpu" and rng.random() < 0.5,
    )


def random_requests(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    return [
        (
            prompt,
            replace(
                random_params(rng),
                structured=rng.choice(FORMS) if rng.random() < 0.25 else None,
                max_tokens=24,
            ),
        )
        for prompt in random_prompts(rng, PER_ROUND)
    ]


def serve(
    core: EngineCore,
    compiler: ConstraintCompiler,
    work: list[tuple[list[int], SamplingParams]],
    rng: random.Random,
    *,
    cancels: float,
) -> list[list[Answer]]:
    made = [
        Request(
            f"{index}",
            prompt,
            params,
            max_tokens=params.max_tokens or 16,
            tokenizer=core.tokenizer,
            vocab_size=core.info.vocab_size,
            arrived_at=0.0,
            tenant=rng.choice("ab"),
            constraint=None if params.structured is None else compiler.compile(params.structured),
        )
        for index, (prompt, params) in enumerate(work)
    ]
    answers: dict[tuple[str, int], Answer] = defaultdict(Answer)
    waiting = list(made)
    while waiting or core.has_work:
        while waiting and rng.random() < 0.6:
            core.add(waiting.pop())
        if rng.random() < cancels:
            core.abort(rng.choice(made))
        for request, delta in core.step():
            answer = answers[request.request_id, delta.index]
            answer.tokens += delta.token_ids
            answer.logprobs += delta.logprobs
            answer.text += delta.text
            answer.finish, answer.error = delta.finish_reason, delta.error
    return [[answers[request.request_id, index] for index in range(request.params.n)] for request in made]


def check_round(folder: Path, draft: Path, backend: str, seed: int) -> dict[str, int]:
    rng = random.Random(f"{folder.name} {backend} {seed}")
    core = build_core(random_config(rng, folder, draft, backend))
    compiler = ConstraintCompiler(core.tokenizer, vocab_size=core.info.vocab_size)
    counts: dict[str, int] = defaultdict(int)
    try:
        work = random_requests(rng)
        without = [(prompt, replace(params, speculate="off")) for prompt, params in work]
        plain = serve(core, compiler, without, rng, cancels=0.0)
        with_drafts: list[tuple[list[int], SamplingParams]] = [
            (prompt, replace(params, speculate=rng.choice(["ngram", "suffix", None])))
            for prompt, params in work
        ]
        drafted = serve(core, compiler, with_drafts, rng, cancels=0.15)
        for request, expected, got in zip(work, plain, drafted, strict=True):
            for before, after in zip(expected, got, strict=True):
                if after.finish is FinishReason.ABORT or after.finish is None:
                    counts["cancelled"] += 1
                    num_tokens = len(after.tokens)
                    assert after.tokens == before.tokens[:num_tokens], request
                    assert before.text.startswith(after.text), request
                    assert after.logprobs == before.logprobs[:num_tokens], request
                else:
                    counts["whole"] += 1
                    assert after == before, request
        assert core.drafts.model is not None
        for blocks in (core._blocks, core.drafts.model.blocks):
            blocks.check()
            assert blocks.counts.held == 0
        counts["requests"] = len(work)
        counts["preempted"] = core._scheduler.num_preemptions
    finally:
        compiler.close()
        core.close()
    return counts


def check(tmp_path: Path, architecture: str, backend: str, seeds: range) -> None:
    dtype = mx.bfloat16 if backend == "cpu" else mx.float32  # on a CPU, MLX's experts need float32
    folder = tiny_models.make_model(tmp_path / architecture, architecture, dtype=dtype)
    draft = tiny_models.make_model(tmp_path / "draft", "llama", dtype=dtype, seed=1, num_hidden_layers=2)
    total: dict[str, int] = defaultdict(int)
    for seed in seeds:
        guesses = folder if seed % 2 else draft
        for name, count in check_round(folder, guesses, backend, seed).items():
            total[name] += count
    assert total["requests"] == PER_ROUND * len(seeds)
    assert total["whole"] > total["cancelled"] > 0


def test_one_round(tmp_path: Path) -> None:
    check(tmp_path, "qwen3", "cpu", range(1))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("architecture", "backend"), [*((name, "cpu") for name in ARCHITECTURES), ("gemma3_text", "reference")]
)
def test_more_rounds(tmp_path: Path, architecture: str, backend: str) -> None:
    check(tmp_path, architecture, backend, range(1, 4 if backend == "cpu" else 3))
