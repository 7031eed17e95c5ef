from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache, make_prompt_cache
from mlx_lm.utils import load_model

import tiny_models
from octavo.block_manager import BlockManager
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor.base import ModelRunner
from octavo.engine.executor.batch import build_batch
from octavo.engine.executor.load import load_runner
from octavo.engine.executor.sampling.sampler import SampleState
from octavo.engine.memory import sizing as page_groups
from octavo.kernels.groups import LayerGroup
from octavo.scheduler import Limits, SampleResult, Scheduler, Sequence

pytestmark = pytest.mark.parity

PAGE_SIZE = 8
CHUNK = 16
MIXED = ["gemma3_text", "gpt_oss", "mistral", "cohere2"]


def load(folder: Path, kv_format: str) -> ModelRunner:
    return load_runner(
        EngineConfig(
            model=str(folder),
            kv_format=kv_format,
            residual_pages=0,
            page_size=PAGE_SIZE,
            num_pages=80,
            max_step_tokens=CHUNK,
            max_running=4,
        )
    )


def serve(
    runner: ModelRunner, max_tokens: int, *, num_prompts: int = 3
) -> tuple[list[list[int]], list[float], set[int]]:
    rng = np.random.default_rng(1)
    first = rng.integers(0, 250, 60).tolist()
    prompts = [first, [*first[:40], 7, 8], rng.integers(0, 250, 5).tolist()][:num_prompts]
    blocks = BlockManager(runner.info.groups, PAGE_SIZE, max_chunk=CHUNK)
    scheduler = Scheduler(blocks, Limits(CHUNK, 4))
    sequences = [
        Sequence(str(i), list(prompt), max_tokens if i == 0 else 9) for i, prompt in enumerate(prompts)
    ]
    states = {
        sequence: SampleState(
            SamplingParams(logprobs=0), seed=0, prompt_ids=sequence.tokens, vocab_size=tiny_models.VOCAB_SIZE
        )
        for sequence in sequences
    }
    scheduler.add(sequences[0])
    logprobs: list[float] = []
    held: set[int] = set()
    for number in range(1000):
        if number == 6:
            for sequence in sequences[1:]:
                scheduler.add(sequence)
        step = scheduler.plan()
        if step is None:
            break
        output = runner.run(build_batch(step, PAGE_SIZE), [states[sequence] for sequence in step.sampled()])
        logprobs += [drawn.logprob.logprob for drawn in output.samples if drawn.logprob is not None]
        scheduler.commit(step, [SampleResult(drawn.token) for drawn in output.samples])
        blocks.check()
        if number > 40 and scheduler.num_running:
            held.add(blocks.groups[-1].num_pages - blocks.idle_pages()[-1])
    assert [sequence.history.num_cached for sequence in sequences[1:2]] == [40][: num_prompts - 1]
    return [sequence.tokens for sequence in sequences], logprobs, held


@pytest.mark.parametrize(
    ("architecture", "kv_format"), list(zip(MIXED, ["fp4", "bf16", "bf16", "fp4"], strict=True))
)
@pytest.mark.few(2)
def test_a_window_costs_a_window_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, kv_format: str
) -> None:
    folder = tiny_models.make_model(tmp_path, architecture)
    grouped = load(folder, kv_format)
    assert [group.window for group in grouped.info.groups] == [None, tiny_models.WINDOW]
    tokens, logprobs, held = serve(grouped, 200)
    assert max(held) <= 3 < 260 // PAGE_SIZE, "12 positions touch three pages of 8"
    grouped.close()

    def one_group(layers: list[object], max_model_len: int) -> tuple[LayerGroup, ...]:
        del max_model_len
        return (LayerGroup(window=None, keep=0, members=tuple(range(len(layers)))),)

    monkeypatch.setattr(page_groups, "group_layers", one_group)
    whole = load(folder, kv_format)
    assert len(whole.info.groups) == 1
    expected_tokens, expected, held = serve(whole, 200)
    assert max(held) > 20
    assert tokens == expected_tokens
    assert logprobs == expected, "bit for bit: the same rows in other pages"
    whole.close()


def check_mlx_lms(folder: Path, tokens: list[int], logprobs: list[float], patch: pytest.MonkeyPatch) -> None:
    plain, _ = load_model(folder)
    for kind in (KVCache, ChunkedKVCache):
        patch.setattr(kind, "update_and_fetch", rounded(kind.update_and_fetch))
    logits = plain(mx.array([tokens[:-1]]), cache=make_prompt_cache(plain))[0, -len(logprobs) :]
    rows = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    errors = np.abs(logprobs - rows[np.arange(len(rows)), tokens[-len(logprobs) :]])
    assert np.median(errors) < 1e-3, (np.median(errors), errors.max())
    assert np.mean(errors > 1e-2) < 0.1


def rounded(update_and_fetch: Callable[..., Any]) -> Callable[..., Any]:
    def update(cache: Any, *rows: mx.array) -> Any:
        return update_and_fetch(cache, *(row.astype(mx.float16).astype(mx.float32) for row in rows))

    return update


@pytest.mark.parametrize("architecture", ["llama4", "deepseek_v32"])
def test_chunks_and_chosen_positions_are_mlx_lms_and_the_same_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    folder = tiny_models.make_model(tmp_path, architecture, dtype=mx.float32)
    runner = load(folder, "fp16")
    together, logprobs, held = serve(runner, 100)
    alone, own, _ = serve(runner, 100, num_prompts=1)
    if architecture == "llama4":
        assert [group.window for group in runner.info.groups] == [None, tiny_models.CHUNK]
        assert max(held) <= 3 < 160 // PAGE_SIZE, "16 positions touch three pages of 8"
    runner.close()
    assert alone[0] == together[0]
    assert set(own) <= set(logprobs), "bit for bit"
    check_mlx_lms(folder, alone[0], own, monkeypatch)
