"""Tiny adapters, and mlx-lm's greedy tokens with each.

As a program: reads a JSON list of {"model", "adapter" (or null), "prompts", "count"},
writes lists of tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_adapters, load_model

from mlx_lm_alone import rounded

ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
DENSE = [*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
MIXER = [
    *ATTENTION, "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj", "mlp.down_proj",
]  # fmt: skip
SWITCH = [*ATTENTION, "mlp.gate", *(f"mlp.switch_mlp.{name}_proj" for name in ("gate", "up", "down"))]
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5_text", "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 320, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
    "rope_parameters": {
        "type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip


def make_adapter(
    folder: Path, model: Path, *, rank: int = 4, scale: float = 10.0, keys: Sequence[str] = DENSE,
    num_layers: int = 4, kind: str = "lora", seed: int = 1,
) -> Path:  # fmt: skip
    """Write an adapter with mlx-lm, as ``mlx_lm.lora`` does; B is not zero."""
    base: Any = load_model(model)[0]
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": list(keys)}
    linear_to_lora_layers(base, num_layers, parameters, use_dora=kind == "dora")
    mx.random.seed(seed)
    weights = {}
    named: Any = tree_flatten(base.parameters())
    for name, value in named:
        leaf = name.rpartition(".")[2]
        if leaf == "lora_a":
            weights[name] = mx.random.normal(value.shape) / value.shape[-1 if value.ndim == 3 else 0] ** 0.5
        elif leaf == "lora_b":
            weights[name] = 0.6 * mx.random.normal(value.shape) / rank**0.5 / scale
        elif leaf == "m":
            weights[name] = value * (1 + 0.1 * mx.random.normal(value.shape))
    save(folder, weights, {"fine_tune_type": kind, "num_layers": num_layers, "lora_parameters": parameters})
    return folder


def to_peft(folder: Path, source: Path, **changes: Any) -> Path:
    """Write mlx-lm's LoRA or DoRA adapter in PEFT's names and orientation."""
    config = json.loads((source / "adapter_config.json").read_text())
    parameters, weights = config["lora_parameters"], {}
    for name, value in mx.load(str(source / "adapters.safetensors")).items():  # type: ignore[union-attr]
        path, _, leaf = name.rpartition(".")
        kind = "lora_magnitude_vector" if leaf == "m" else f"lora_{leaf[-1].upper()}"
        weights[f"base_model.model.{path}.{kind}.weight"] = value if leaf == "m" else mx.contiguous(value.T)
    alpha = parameters["scale"] * parameters["rank"]
    own = {"peft_type": "LORA", "r": parameters["rank"], "lora_alpha": alpha, "bias": "none"}
    save(folder, weights, own | changes, file="adapter_model.safetensors")
    return folder


def save(
    folder: Path, weights: dict[str, mx.array], config: Any, *, file: str = "adapters.safetensors"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / file), weights)
    (folder / "adapter_config.json").write_text(json.dumps(config))


def quantize_folder(folder: Path, source: Path, *, bits: int = 4) -> Path:
    """Write a copy of ``source`` in MLX's affine groups of 64."""
    from mlx.nn.layers.quantized import quantize

    model, config = load_model(source)
    quantize(model, 64, bits)
    folder.mkdir(parents=True)
    for file in source.glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization": {"group_size": 64, "bits": bits}})
    )
    return folder


def tokens_of_mlx_lm(jobs: list[dict[str, Any]]) -> list[list[list[int]]]:
    """Answer jobs in a new process with mlx-lm alone."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    answers: list[list[list[int]]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def answer(job: dict[str, Any]) -> list[list[int]]:
    model: Any
    model, _ = load_model(Path(job["model"]))
    if job["adapter"] is not None:
        model = load_adapters(model, job["adapter"])
    model.eval()
    found = []
    for prompt in job["prompts"]:
        cache = [rounded(one, mx.float16) for one in make_prompt_cache(model)]  # as pages store K and V
        feed, tokens = prompt, list[int]()
        for _ in range(job["count"]):
            logits = np.array(model(mx.array([feed]), cache=cache)[0, -1].astype(mx.float32))
            tokens.append(int(logits.argmax()))
            feed = tokens[-1:]
        found.append(tokens)
    return found


if __name__ == "__main__":
    assert not any(name.partition(".")[0] == "octavo" for name in sys.modules)
    mx.set_default_device(mx.cpu)
    print(json.dumps([answer(job) for job in json.load(sys.stdin)]))
