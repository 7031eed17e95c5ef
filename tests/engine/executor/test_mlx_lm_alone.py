"""Served log probabilities beside those of mlx-lm in a process that imports nothing of Octavo."""

from __future__ import annotations

import json
import subprocess
import sys
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

pytestmark = pytest.mark.parity

WORST = 0.01  # of a log probability: float32 weights, and K and V rounded alike on both sides
NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h", "vocab_size": 320, "hidden_size": 128, "intermediate_size": 128,
    "max_position_embeddings": 1000, "num_attention_heads": 8, "num_key_value_heads": 4,
    "attention_bias": False, "mamba_num_heads": 8, "mamba_head_dim": 64, "mamba_proj_bias": False,
    "ssm_state_size": 128, "conv_kernel": 3, "n_groups": 4, "time_step_limit": [1.0, 2.0],
    "mlp_bias": False, "layer_norm_epsilon": 1e-4, "use_bias": True, "use_conv_bias": True,
    "hybrid_override_pattern": ["*", "M", "*", "M"],
}  # fmt: skip
_SHRUNK = {"num_hidden_layers": 2, "vocab_size": 320, "max_position_embeddings": 8192}
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": _SHRUNK | {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 100000, "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": _SHRUNK | {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
        "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": _SHRUNK | {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""config.json as published, but for the numbers of layers and of tokens."""


def differences(folder: Path, config: dict[str, Any], lengths: tuple[int, ...] = (5, 37)) -> np.ndarray:
    """The largest difference of a log probability in every row, prompts and greedy tokens of them."""
    require_extension()
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 300, length).tolist() for length in lengths]
    job = {"folder": str(folder), "config": config, "prompts": prompts, "num_tokens": 6, "dtype": "float32"}
    done = subprocess.run(
        [sys.executable, mlx_lm_alone.__file__],
        input=json.dumps(job | {"seed": 0, "pages": "float16"}) + "\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    answer = json.loads(done.stdout.rpartition(f"{mlx_lm_alone.END} ")[2])
    assert "error" not in answer, answer
    tiny_models.make_tokenizer(folder)
    wanted = np.load(folder / "logprobs.npz")
    settings = EngineConfig(
        model=str(folder),
        backend="cpu",
        num_pages=64,
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


def test_norms_in_groups_are_served_as_mlx_lm_computes_them(tmp_path: Path) -> None:
    assert differences(tmp_path, NEMOTRON_H).max() < WORST


@pytest.mark.parametrize("architecture", ["glm_moe_dsa", "deepseek_v32"])
def test_choices_of_positions_differ_by_rounding_and_ties_only(tmp_path: Path, architecture: str) -> None:
    """With index keys rounded as in pages, and the earliest of equal scores chosen, nothing differs."""
    from octavo_lab.architectures.configurations import configuration

    config = configuration(architecture) | {"index_topk": 16}
    assert differences(tmp_path, config).max() < WORST


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_served_as_mlx_lm_computes_them(tmp_path: Path, name: str) -> None:
    assert differences(tmp_path, PUBLISHED[name]).max() < WORST
