from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import octavo.engine
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.outputs import RequestOutput
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.frontend.llm import LLM

pytestmark = pytest.mark.parity

PROMPTS = ["Once upon a time there was a lamp. " * 4, "Mara", "A", "The sea and the hill and the door"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The demo model in float32, with fp16 pages and chunks of at most 24 tokens."""
    import mlx.core as mx

    folder = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(Path(octavo.engine.__file__).parent / "demo", folder)
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    wide = {name: value.astype(mx.float32) for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), wide)
    config = EngineConfig(
        model=str(folder),
        backend="reference",
        kv_format="fp16",
        num_pages=64,
        page_size=16,
        max_running=4,
        max_step_tokens=24,
    )
    with LLM(config) as made:
        yield made


def plain_logprobs(llm: LLM, ids: list[int]) -> np.ndarray:
    """Return natural-log probabilities [L, V] from mlx-lm alone."""
    import mlx.core as mx
    from mlx_lm import load

    model, *_ = load(str(llm.info.path))
    logits = np.array(model(mx.array([ids])).astype(mx.float32))[0].astype(np.float64)
    shifted: np.ndarray = logits - logits.max(-1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def check(llm: LLM, output: RequestOutput, prompt: str, num_top: int) -> None:
    ids = llm.tokenizer.encode(prompt)
    found = output.prompt_logprobs
    assert found is not None
    assert [found.first_id, *(entry.token_id for entry in found.rest)] == ids
    expected = plain_logprobs(llm, ids)
    for position, entry in enumerate(found.rest):
        row = expected[position]
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=0.06)
        assert len(entry.top) == num_top
        best = np.sort(row)[::-1][:num_top]
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.tolist(), abs=0.06)


def test_they_are_those_of_a_plain_forward(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, prompt_logprobs=4)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        check(llm, output, prompt, 4)


def test_penalties_bias_and_temperature_do_not_touch_them(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=3, prompt_logprobs=0, temperature=2.0, repetition_penalty=1.9, logit_bias={5: 90.0}, n=2
    )
    (output,) = llm.generate(PROMPTS[0], params)
    check(llm, output, PROMPTS[0], 0)


def test_a_cached_prompt_is_computed_again_and_agrees(llm: LLM) -> None:
    plain, asked = SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, prompt_logprobs=1)
    prompt = "There was a house by the sea. " * 6
    (first,) = llm.generate(prompt, plain)
    (second,) = llm.generate(prompt, plain)
    assert second.cached_tokens > 0
    (scored,) = llm.generate(prompt, asked)
    assert scored.cached_tokens == 0
    check(llm, scored, prompt, 1)
    assert scored.outputs[0].token_ids == first.outputs[0].token_ids
    (after,) = llm.generate(prompt, plain)
    assert after.cached_tokens == second.cached_tokens
