from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tiny_models
from octavo.block_manager import BlockManager, ResidualWindow
from octavo.engine.api.config import Backend, EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor.base import ModelRunner
from octavo.engine.executor.batch import build_batch
from octavo.engine.executor.load import load_runner
from octavo.engine.executor.model_runner import PagedRunner
from octavo.engine.executor.sampling.sampler import SampleState
from octavo.scheduler import Limits, SampleResult, Scheduler, Sequence

pytestmark = pytest.mark.parity

PAGE_SIZE = 8
CHUNK = 24
CONFIG = EngineConfig(
    kv_format="fp4", page_size=PAGE_SIZE, num_pages=80, max_step_tokens=CHUNK, max_running=4
)


def load(folder: Path, config: EngineConfig) -> ModelRunner:
    return load_runner(replace(config, model=str(folder)))


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    first = rng.integers(0, 250, 60).tolist()
    return [first, [*first[:40], 7, 8], rng.integers(0, 250, 5).tolist(), [9] * 30]


def serve(
    runner: ModelRunner, sequences: list[Sequence], *, chunk: int = CHUNK, num_residual: int | None = None
) -> dict[str, tuple[list[int], list[float]]]:
    groups = tuple(
        replace(group, num_pages=num_residual)
        if num_residual and isinstance(group, ResidualWindow)
        else group
        for group in runner.info.groups
    )
    blocks = BlockManager(groups, PAGE_SIZE, max_chunk=chunk)
    scheduler = Scheduler(blocks, Limits(chunk, 4))
    states = {
        member: SampleState(
            SamplingParams(logprobs=0), seed=0, prompt_ids=member.tokens, vocab_size=tiny_models.VOCAB_SIZE
        )
        for sequence in sequences
        for member in (sequence, *sequence.parallel_samples)
    }
    logprobs: dict[Sequence, list[float]] = {sequence: [] for sequence in states}
    for number in range(1000):
        if number in (0, 8):
            for sequence in sequences[1:] if number else sequences[:1]:
                scheduler.add(sequence)
        step = scheduler.plan()
        if step is None and number > 8:
            break
        if step is None:
            continue
        sampled = step.sampled()
        output = runner.run(build_batch(step, PAGE_SIZE, groups), [states[sequence] for sequence in sampled])
        for sequence, drawn in zip(sampled, output.samples, strict=True):
            assert drawn.logprob is not None
            logprobs[sequence].append(drawn.logprob.logprob)
        scheduler.commit(step, [SampleResult(drawn.token) for drawn in output.samples])
        blocks.check()
    assert blocks.idle_pages() == tuple(group.num_pages for group in groups)
    return {sequence.sequence_id: (sequence.tokens, found) for sequence, found in logprobs.items()}


def requests(max_tokens: int = 40) -> list[Sequence]:
    made = [Sequence(str(i), list(prompt), max_tokens) for i, prompt in enumerate(prompts())]
    made[3].parallel_samples = [Sequence("3b", list(made[3].tokens), max_tokens)]
    return made


@pytest.mark.parametrize(("architecture", "backend"), [("qwen3", "reference"), ("gemma3_text", "cpu")])
@pytest.mark.few(1)
def test_with_all_pages_kept_tokens_are_those_of_16_bit_pages(
    tmp_path: Path, architecture: str, backend: Backend
) -> None:
    folder = tiny_models.make_model(tmp_path, architecture)
    config = replace(CONFIG, backend=backend)
    answers = []
    for settings in ({"kv_format": "bf16"}, {"sink_pages": 80}, {"quantize_after": 10**6}):
        if architecture == "gemma3_text" and "sink_pages" in settings:
            continue
        runner = load(folder, replace(config, **settings))
        answers.append(serve(runner, requests()))
        if backend == "cpu":
            assert isinstance(runner, PagedRunner)
            assert runner._model.graph_runner is not None
            assert runner._model.graph_runner.num_replayed > 20
        runner.close()
    for other in answers[1:]:
        assert other.keys() == answers[0].keys()
        for name, (tokens, logprobs) in answers[0].items():
            assert other[name][0] == tokens
            np.testing.assert_allclose(other[name][1], logprobs, rtol=0, atol=0.03)


@pytest.mark.parametrize("settings", [{"residual_pages": 1}, {"sink_pages": 1, "quantize_after": 50}])
@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
@pytest.mark.few(2)
def test_served_together_in_other_chunks_or_short_of_residual_pages_equals_served_alone(
    tmp_path: Path, architecture: str, settings: dict[str, int]
) -> None:
    folder = tiny_models.make_model(tmp_path, architecture)
    runner = load(folder, replace(CONFIG, **settings))  # type: ignore[arg-type]
    together = serve(runner, requests())
    short = 12 if "quantize_after" in settings else 5
    in_need = serve(runner, requests(), num_residual=short)
    in_chunks = serve(runner, requests(), chunk=7)
    for request in requests():
        for member in (request, *request.parallel_samples):
            alone = serve(runner, [Sequence(member.sequence_id, list(member.tokens), 40)])
            for answers in (together, in_need, in_chunks):
                assert answers[member.sequence_id][0] == alone[member.sequence_id][0]
    runner.close()
    plain = load(folder, CONFIG)
    assert serve(plain, requests()) != together, "16-bit rows make a difference"
    plain.close()
