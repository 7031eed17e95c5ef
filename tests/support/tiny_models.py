"""Tiny models of real architectures with random weights, as loadable folders.

Windows are shorter than the sequences of tests."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import tokenizers
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING
from tokenizers import decoders, models, pre_tokenizers

VOCAB_SIZE = 320
WINDOW = 12

_COMMON: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": _MOE,
    "mistral": _ALTERNATING,
    "ministral3": _ALTERNATING
    | {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        }
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 1000.0,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "phi3": {"partial_rotary_factor": 0.5},
    "olmo2": {},
    "cohere2": {
        "layer_norm_eps": 1e-5,
        "logit_scale": 1.0,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "gemma2": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16.0},
    "gpt_oss": _ALTERNATING | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""By architecture: its name in config.json, and changes to the configuration."""

LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_layer_freq": 1,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16, "moe_intermediate_size": 32,
        "num_key_value_heads": 4,
    }
}  # fmt: skip
LATENT["deepseek_v32"] = LATENT["deepseek_v3"] | {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 8}
"""Architectures that cache latents; the last one has sparse attention."""

CHUNK = 16
CHUNKED: dict[str, dict[str, Any]] = {
    "llama4": {
        "text_config": _COMMON
        | {
            "model_type": "llama4_text", "attention_chunk_size": CHUNK, "floor_scale": 8,
            "interleave_moe_layer_step": 2, "intermediate_size_mlp": 128, "num_local_experts": 4,
            "num_experts_per_tok": 1, "attention_bias": False, "rope_scaling": None, "use_qk_norm": True,
        }
    }
}  # fmt: skip
"""Architectures with chunked attention layers."""

OWN_ATTENTION: dict[str, dict[str, Any]] = {
    "gear": {"layer_types": ["full_attention"] * 4, "attn_logit_softcapping": 2.0},
    "phi3small": {
        "vocab_size": 100_352, "num_hidden_layers": 2, "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 128, "gegelu_limit": 20.0, "layer_norm_epsilon": 1e-5,
        "mup_attn_multiplier": 4.0, "blocksparse_block_size": 32, "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 3,
    },
    "minimax_m3_vl": {
        "text_config": _COMMON
        | {
            "moe_layer_freq": [0, 0, 1, 1],
            "dense_intermediate_size": 128,
            "shared_intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 8,
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 16,
                "sparse_block_size": 8,
                "sparse_topk_blocks": 3,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1, 1, 1],
            },
        }
    },
}  # fmt: skip
"""Architectures with their own arithmetic on K and V, or their own masks."""


def make_model(
    folder: Path, architecture: str, *, dtype: mx.Dtype = mx.bfloat16, seed: int = 0, **changes: Any
) -> Path:
    """Write a model folder: config, random weights, byte tokenizer. Returns ``folder``."""
    config = (
        _COMMON
        | (CONFIGS | LATENT | CHUNKED | OWN_ATTENTION).get(architecture, {})
        | {"model_type": architecture}
        | changes
    )
    module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(architecture, architecture)}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    parameters = dict(tree_flatten(model.parameters()))
    weights = {name: _spread(name, value).astype(dtype) for name, value in parameters.items()}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config |= {"eos_token_id": VOCAB_SIZE - 1}
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer(folder)
    return folder


def _spread(name: str, value: mx.array) -> mx.array:
    """Scale random weights so that attention and logits are far from uniform."""
    if name.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight")):
        return value * 3
    if name.endswith(("mlp.gate.weight", "router.weight")):  # avoids ties between experts
        return value * 10
    if value.ndim == 1:
        return value + 0.3 * mx.random.normal(value.shape)
    return value * 1.5


def make_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: IDs 0 to 255 are bytes, the last ID ends a text."""
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    alphabet |= {f"<unused{i}>": i for i in range(len(alphabet), VOCAB_SIZE - 1)}
    alphabet["<end>"] = VOCAB_SIZE - 1
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
