from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlx_lm_alone
import tiny_models
from native import require_extension
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.frontend.llm import LLM
from published_models import CONFIGS, LONGEST_WINDOW, small, window_of

pytestmark = pytest.mark.parity

ALIKE = {
    "meta-llama/Llama-3.2-1B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "microsoft/phi-4",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "mistralai/Mistral-7B-Instruct-v0.3", "Qwen/Qwen2-7B-Instruct",
    "mlx-community/Qwen3-0.6B-4bit",
}  # fmt: skip
"""Configurations that differ from another one only in the numbers of heads."""
WORST = 0.01  # largest error of a log probability; both sides round K and V alike
NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h", "vocab_size": 320, "hidden_size": 128, "intermediate_size": 128,
    "max_position_embeddings": 1000, "num_attention_heads": 8, "num_key_value_heads": 4,
    "attention_bias": False, "mamba_num_heads": 8, "mamba_head_dim": 64, "mamba_proj_bias": False,
    "ssm_state_size": 128, "conv_kernel": 3, "n_groups": 4, "time_step_limit": [1.0, 2.0],
    "mlp_bias": False, "layer_norm_epsilon": 1e-4, "use_bias": True, "use_conv_bias": True,
    "hybrid_override_pattern": ["*", "M", "*", "M"],
}  # fmt: skip


Asks = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Asks]:
    command = [sys.executable, mlx_lm_alone.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        jobs, lines = process.stdin, process.stdout

        def ask(job: dict[str, Any]) -> dict[str, Any]:
            print(json.dumps(job), file=jobs, flush=True)
            said = next(line for line in lines if line.startswith(f"{mlx_lm_alone.END} "))
            answer: dict[str, Any] = json.loads(said.removeprefix(mlx_lm_alone.END))
            return answer

        yield ask
        jobs.close()


def differences(
    ask: Asks, folder: Path, config: dict[str, Any], lengths: tuple[int, ...] = (5, 37)
) -> np.ndarray:
    require_extension()
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 300, length).tolist() for length in lengths]
    job = {"folder": str(folder), "config": config, "prompts": prompts, "num_tokens": 6, "dtype": "float32"}
    answer = ask(job | {"seed": 0, "pages": "float16"})
    assert "error" not in answer, answer
    tiny_models.make_tokenizer(folder)
    wanted = np.load(folder / "logprobs.npz")
    settings = EngineConfig(
        model=str(folder),
        backend="cpu",
        num_pages=64 + sum(lengths) // 16,
        page_size=16,
        kv_format="fp16",
        max_running=4,
        max_step_tokens=24,
    )
    whole = [prompt + tokens[:-1] for prompt, tokens in zip(prompts, answer["tokens"], strict=True)]
    with LLM(settings) as llm:
        asked = SamplingParams(max_tokens=1, logprobs=20, prompt_logprobs=20, temperature=0)
        outputs = llm.generate(whole, asked, progress=False)
    errors = []
    for index, output in enumerate(outputs):
        assert output.prompt_logprobs is not None
        rows = [*output.prompt_logprobs.rest, *output.outputs[0].logprobs]
        for row, right in zip(rows, wanted[str(index)], strict=True):
            errors.append(max(abs(logprob - float(right[token])) for token, logprob in row.top))
    return np.array(errors)


def test_norms_in_groups_are_served_as_mlx_lm_computes_them(ask: Asks, tmp_path: Path) -> None:
    assert differences(ask, tmp_path, NEMOTRON_H).max() < WORST


@pytest.mark.parametrize("architecture", ["glm_moe_dsa", "deepseek_v32"])
def test_choices_of_positions_differ_by_rounding_and_ties_only(
    ask: Asks, tmp_path: Path, architecture: str
) -> None:
    from octavo_lab.architectures.configurations import configuration

    config = configuration(architecture) | {"index_topk": 16}
    assert differences(ask, tmp_path, config).max() < WORST


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - ALIKE))
def test_published_configurations_are_served_as_mlx_lm_computes_them(
    ask: Asks, tmp_path: Path, name: str
) -> None:
    config = small(name)
    window = window_of(config) or 0
    lengths = (5, window + 9 if 0 < window <= LONGEST_WINDOW else 37)
    assert np.quantile(differences(ask, tmp_path, config, lengths), 0.98) < WORST
