from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import tiny_models
from draft_checks import Drafts
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.outputs import RequestOutput
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor import device_step
from octavo.engine.executor.batch import Batch
from octavo.engine.executor.device_step import DeviceStep
from octavo.engine.executor.sampling import device_sampling
from octavo.engine.executor.sampling.device_sampling import UNSURE
from octavo.engine.executor.sampling.logit_rows import Sampler
from octavo.engine.executor.sampling.sampler import SampleState
from octavo.engine.frontend.llm import LLM

pytestmark = pytest.mark.parity

FORMATS = ("bf16", "fp5/fp4", "int8", "int4")


class Watched:
    def __init__(self) -> None:
        self.num_steps = self.num_followed = self.num_void = self.num_on_host = 0


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    counts, resolve, take, redraw = Watched(), DeviceStep.resolve, DeviceStep.take, DeviceStep._resample

    def resolving(self: DeviceStep) -> Any:
        counts.num_steps += 1
        output = resolve(self)
        counts.num_void += len(output.discarded)
        return output

    def taking(self: DeviceStep, sources: Any) -> Any:
        counts.num_followed += 1
        return take(self, sources)

    def redrawing(self: DeviceStep, unsure: Sequence[int], tokens: Sequence[int]) -> Any:
        counts.num_on_host += len(unsure)
        return redraw(self, unsure, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceStep, "resolve", resolving)
        patch.setattr(DeviceStep, "take", taking)
        patch.setattr(DeviceStep, "_resample", redrawing)
        yield counts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def engine(folder: Path, **settings: Any) -> LLM:
    small: dict[str, Any] = {"page_size": 8, "num_pages": 60, "max_running": 6, "max_step_tokens": 48}
    return LLM(EngineConfig(model=str(folder), **({"backend": "reference"} | small | settings)))


def requests(rng: random.Random, count: int) -> list[tuple[list[int], SamplingParams]]:
    shared = [rng.randrange(250) for _ in range(20)]
    made = []
    for _ in range(count):
        prompt = shared[: rng.choice([0, 9, 20])] + [rng.randrange(250) for _ in range(rng.randint(1, 20))]
        temperature = rng.choice([0.0, 0.5, 1.0])
        params = SamplingParams(
            max_tokens=rng.randint(1, 20),
            temperature=temperature,
            top_k=rng.choice([0, 0, 3, 40]),
            top_p=rng.choice([1.0, 0.7]),
            min_p=rng.choice([0.0, 0.05]),
            seed=rng.randrange(2**32),
            n=rng.choice([1, 1, 1, 2]) if temperature else 1,
            stop=("a",) if rng.random() < 0.2 else (),
        )
        if rng.random() < 0.2:
            params = replace(
                params,
                presence_penalty=rng.choice([0.0, 0.5]),
                logit_bias={rng.randrange(250): 3.0},
                min_tokens=rng.choice([0, 3]),
                logprobs=rng.choice([None, 2]),
            )
        made.append((prompt, params))
    return made


def answers(llm: LLM, seed: int, count: int = 9) -> list[object]:
    made = requests(random.Random(seed), count)
    outputs = llm.generate([prompt for prompt, _ in made], [params for _, params in made], progress=False)
    return list(map(essence, outputs))


def essence(output: RequestOutput) -> object:
    return [(c.text, c.token_ids, c.finish_reason, c.stop_match, c.error, c.logprobs) for c in output.outputs]


@pytest.mark.parametrize(
    ("kv_format", "backend"), [("fp5/fp4", "reference"), *((name, "cpu") for name in FORMATS)]
)
@pytest.mark.few(2)
def test_every_page_format_gives_the_same(
    folder: Path, kv_format: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"kv_format": kv_format, "backend": backend}
    with engine(folder, **settings, async_steps=False) as llm:
        expected = [answers(llm, seed) for seed in range(2)]
    with watched(monkeypatch) as counts, engine(folder, **settings, async_steps=True) as llm:
        assert [answers(llm, seed) for seed in range(2)] == expected
    assert counts.num_followed > 10
    assert counts.num_steps > counts.num_followed


@pytest.mark.usefixtures("every_draft_is_computed")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.few(1)
def test_overlapped_steps_with_drafts_give_equal_outputs(
    folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(250) for _ in range(9)] for _ in range(6)]
    params = [
        SamplingParams(
            max_tokens=40,
            temperature=2.0,
            seed=number,
            ignore_eos=True,
            logit_bias=dict.fromkeys((1, 2), 80.0) if number % 2 else {},
        )
        for number in range(6)
    ]
    drafts = Drafts()
    with engine(folder, backend=backend, async_steps=False) as llm:
        expected = [essence(each) for each in llm.generate(prompts, params, progress=False)]
    config = EngineConfig(
        model=str(folder),
        backend=backend,  # type: ignore[arg-type]
        async_steps=True,
        speculate="ngram",
        page_size=8,
        num_pages=90,
        max_running=1,
    )
    with watched(monkeypatch) as counts, LLM(config, observer=drafts) as llm:
        assert [essence(each) for each in llm.generate(prompts, params, progress=False)] == expected
    assert counts.num_followed > 10
    assert drafts.num_accepted > 10
    assert drafts.num_rejected > 3


@pytest.mark.parametrize("architecture", ["gemma3_text", "llama"])
def test_windows_and_short_pools_give_the_same(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_models.make_model(tmp_path / architecture, architecture)
    with engine(folder, async_steps=False) as llm:
        expected = answers(llm, 5)
    with watched(monkeypatch) as counts, engine(folder, num_pages=22, async_steps=True) as llm:
        assert answers(llm, 5) == expected
    assert counts.num_followed > 0


def test_a_token_that_the_host_changes_repeats_its_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(folder, async_steps=False) as llm:
        expected = [answers(llm, seed) for seed in range(2)]
    draw, calls = device_sampling.draw_tokens, 0

    def wrong_at_times(logits: mx.array, draws: Any) -> mx.array:
        nonlocal calls
        calls += 1
        tokens, verdicts = draw(logits, draws)
        if calls % 3:
            return mx.stack([tokens, verdicts])
        first = mx.arange(tokens.shape[0]) == 0
        wrong = mx.where(first, (tokens + 1) % logits.shape[1], tokens)
        return mx.stack([wrong, mx.where(first, UNSURE, verdicts)])

    monkeypatch.setattr(device_step, "draw_tokens", wrong_at_times)
    with watched(monkeypatch) as counts, engine(folder, async_steps=True) as llm:
        assert [answers(llm, seed) for seed in range(2)] == expected
    assert counts.num_void > 3
    assert counts.num_followed > counts.num_void


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    logits[1, 7], logits[2, 9], logits[3] = np.nan, np.inf, -np.inf
    states = [
        SampleState(SamplingParams(temperature=t), seed=1, prompt_ids=[], vocab_size=300)
        for t in (0, 0, 1, 1)
    ]
    batch = Batch(
        token_ids=np.zeros(4, np.int32), sample_rows=np.arange(4, dtype=np.int32), attention=None  # type: ignore[arg-type]
    )  # fmt: skip
    step = DeviceStep(batch, mx.array(logits), range(4), states, [], sampling=Sampler(), feeds=True)
    samples = step.resolve().samples
    assert [sampled.token is None for sampled in samples] == [False, True, True, True]
    assert samples[0].token == int(logits[0].argmax())
    assert all("not finite" in (sampled.error or "") for sampled in samples[1:])
    assert all(0 <= token < 300 for token in np.array(step.tokens).tolist()), "the next step may look them up"
