from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from http_served import openai_client
from octavo.engine import LLM, EngineConfig, SamplingParams
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.sampling_params import Pooling
from octavo.engine.client.server_process import ServerProcess
from octavo.engine.executor.mlx_lm_import import utils
from tiny_models import VOCAB_SIZE, make_model

pytestmark = pytest.mark.parity

# fp16 pages round less than bf16 pages. The models and the reference compute in float32.
SMALL: dict[str, Any] = {
    "kv_format": "fp16", "num_pages": 64, "max_running": 8, "max_step_tokens": 32, "page_size": 16,
}  # fmt: skip
LENGTHS = (1, 5, 16, 33, 80)  # tokens of each prompt; chunks of 32
Vectors = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=["qwen3", "llama", "gemma3_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param, dtype=mx.float32)


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in LENGTHS]


def _mlx_lm(folder: Path, prompts: list[list[int]], pooling: Pooling) -> Vectors:
    model, _ = utils.load_model(folder)
    pooled = []
    for prompt in prompts:
        states = np.array(model.model(mx.array([prompt])).astype(mx.float32))[0]
        pooled.append(states[-1] if pooling == "last" else states.mean(axis=0))
    return np.stack(pooled)


def _cosines(a: npt.ArrayLike, b: npt.ArrayLike) -> Vectors:
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    found: Vectors = (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
    return found


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.few(3)
def test_pooled_hidden_states_are_mlx_lms(folder: Path, pooling: Pooling) -> None:
    prompts = _prompts()
    expected = _mlx_lm(folder, prompts, pooling)
    with LLM(EngineConfig(model=str(folder), **SMALL)) as llm:
        found = llm.embed(prompts, pooling=pooling, normalize=False)
        again = llm.embed(prompts, pooling=pooling, normalize=False)
        unit = np.array(llm.embed(prompts, pooling=pooling))
        short = np.array(llm.embed(prompts, pooling=pooling, dimensions=8))
    assert _cosines(found, expected).min() >= 0.99999
    lengths = np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.allclose(lengths, 1, atol=2e-3)
    assert found == again, "with a warm cache, to the bit"
    assert np.allclose(np.linalg.norm(unit, axis=1), 1)
    assert np.allclose(np.linalg.norm(short, axis=1), 1)
    assert _cosines(short, expected[:, :8]).min() >= 0.99999
    others = _cosines(found, np.roll(expected, 1, axis=0))
    assert others.max() < 0.999, "embeddings of different prompts differ"


def test_a_shared_instruction_is_computed_once(folder: Path) -> None:
    instruction = np.random.default_rng(4).integers(0, VOCAB_SIZE, 48).tolist()
    params = SamplingParams(max_tokens=1, ignore_eos=True, pooling="last")
    with LLM(EngineConfig(model=str(folder), **SMALL)) as llm:
        first, second = (llm.generate([[*instruction, token]], params)[0] for token in (5, 6))
        mean = llm.generate([[*instruction, 5]], SamplingParams(max_tokens=1, pooling="mean"))[0]
        beside = llm.generate([[*instruction, 5]], SamplingParams(max_tokens=4, logprobs=1, ignore_eos=True))[
            0
        ]
    assert (first.cached_tokens, second.cached_tokens, mean.cached_tokens) == (0, 48, 0)
    assert beside.embedding is None
    assert first.outputs[0].token_ids[0] == beside.outputs[0].token_ids[0]


def test_invalid_embedding_requests_are_refused(folder: Path) -> None:
    with LLM(EngineConfig(model=str(folder), **SMALL)) as llm:
        with pytest.raises(InvalidRequest, match="dimensions must be between 1 and 64"):
            llm.embed([[1, 2]], dimensions=65)
        with pytest.raises(InvalidRequest, match="pooling"):
            llm.embed([[1, 2]], pooling="max")  # type: ignore[arg-type]


async def test_embeddings_over_http_are_those_of_python() -> None:
    texts = ["The baker went home.", "A ledger of many words, " * 8]
    flags = ["demo", "--num-pages", "64", "--http", "127.0.0.1:0"]
    async with ServerProcess(flags) as server, openai_client(server.ready) as client:
        asked: dict[str, Any] = {"model": "demo", "input": texts}
        # Without a format, the client requests base64.
        forms: tuple[dict[str, Any], ...] = ({"encoding_format": "float"}, {})
        replies = [await client.embeddings.create(**asked, **form) for form in forms]
    with LLM(EngineConfig(num_pages=64)) as llm:
        own = llm.embed(texts)
    for reply in replies:
        assert _cosines([item.embedding for item in reply.data], own).min() >= 0.99999
