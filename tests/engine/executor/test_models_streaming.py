from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

import tiny_models
from octavo.block_manager import BlockManager, FullAttention, SlidingWindow
from octavo.engine import LLM, EngineConfig, SamplingParams
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.core.build import build_core
from octavo.engine.core.request import Request

pytestmark = pytest.mark.parity

MAX_KV_SIZE = 24
PROMPT = [number * 7 % 250 for number in range(20)]


def config(folder: Path, **changes: object) -> EngineConfig:
    settings: dict[str, object] = {
        "model": str(folder), "page_size": 8, "num_pages": 40, "max_step_tokens": 16, "max_running": 4,
        "max_kv_size": MAX_KV_SIZE,
    }  # fmt: skip
    return EngineConfig(**(settings | changes))  # type: ignore[arg-type]


def rotating_logprobs(folder: Path, tokens: list[int], max_kv_size: int | None) -> list[float]:
    model, _ = load_model(folder)
    caches = make_prompt_cache(model, max_kv_size=max_kv_size)
    logprobs = []
    for at, token in enumerate(tokens[:-1]):
        logits = model(mx.array([[token]]), cache=caches)[0, -1].astype(mx.float32)
        if at >= len(PROMPT) - 1:
            logprobs.append(float(logits[tokens[at + 1]] - mx.logsumexp(logits)))
    return logprobs


def test_tokens_beyond_the_size_equal_those_of_a_rotating_cache(tmp_path: Path) -> None:
    folder = tiny_models.make_model(tmp_path, "qwen3", dtype=mx.float32)
    with LLM(config(folder, kv_format="fp16")) as llm:
        (output,) = llm.generate(
            [PROMPT], SamplingParams(max_tokens=80, ignore_eos=True, logprobs=0), progress=False
        )
    answer = output.outputs[0]
    assert answer.logprobs is not None
    got = [entry.logprob for entry in answer.logprobs]
    tokens = [*PROMPT, *answer.token_ids]
    np.testing.assert_allclose(got, rotating_logprobs(folder, tokens, MAX_KV_SIZE), atol=0.03)
    everything = np.array(rotating_logprobs(folder, tokens, None))
    assert np.abs(np.array(got) - everything).max() > 0.3, "what is out of sight matters here"


def held_while_generating(settings: EngineConfig, num_tokens: int) -> list[int]:
    held: list[int] = []
    core = build_core(settings)
    request = Request(
        "only",
        PROMPT,
        SamplingParams(max_tokens=num_tokens, ignore_eos=True),
        max_tokens=num_tokens,
        tokenizer=core.tokenizer,
        vocab_size=core.info.vocab_size,
        arrived_at=0.0,
    )
    core.add(request)
    for number in range(num_tokens + 1):
        core.step()
        if number % 1000 == 999:
            blocks = core._blocks
            held.append(blocks.groups[-1].num_pages - blocks.idle_pages()[-1])
    core.close()
    return held


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "kv_format"), [("qwen3", "fp4"), ("mistral", "bf16")])
def test_five_thousand_tokens_hold_a_window(tmp_path: Path, architecture: str, kv_format: str) -> None:
    """The models have windows of 512 positions, mistral also of 12."""
    folder = tiny_models.make_model(tmp_path, architecture, head_dim=32)
    held = held_while_generating(config(folder, kv_format=kv_format, max_model_len=30_000), 5_000)
    assert len(held) == 5
    assert max(held) <= 1 + (3 if architecture == "mistral" else 5), "kept, and what a window touches"


@pytest.mark.parametrize(("window", "keep"), [(20, 0), (20, 4), (100, 0), (4096, 4)])
def test_a_window_s_pages_do_not_grow(window: int, keep: int) -> None:
    size, groups = 32, (FullAttention(num_pages=700), SlidingWindow(num_pages=180, window=window, keep=keep))
    blocks = BlockManager(groups, size, max_chunk=512)
    tokens = [number % 7 for number in range(20_000)]
    table = blocks.open(tokens[:513])
    held: list[int] = []
    for stop in (512, *range(513, 20_001)):
        assert blocks.reserve(table, stop)
        blocks.commit(table, tokens, stop)
        if stop % 500 == 0:
            held.append(180 - blocks.idle_pages()[1])
    touched = (window + size - 2) // size + 1
    assert max(held[-10:]) <= (keep > 0) + touched + 1
    assert 700 - blocks.num_idle == 625
    blocks.check()
    blocks.close(table)


def test_sizes_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    folder = tiny_models.make_model(tmp_path, "qwen3")
    with pytest.raises(InvalidConfig, match="max_kv_size must be at least 5, got 4"):
        config(folder, max_kv_size=4)
    with pytest.raises(InvalidConfig, match="max_kv_size must be at most 512"):
        LLM(config(folder, max_kv_size=600))
    with pytest.raises(InvalidConfig, match="max_model_len must be at most 512"):
        LLM(config(folder, max_kv_size=None, max_model_len=600))
