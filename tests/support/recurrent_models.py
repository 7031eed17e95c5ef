# ruff: noqa: E501  (a table)
"""Tiny random models of every recurrent architecture of mlx-lm."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten

import tiny_models

GDN = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
ATTENTION = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1000,
}
BASE = {
    "hidden_size": 64,
    "vocab_size": 320,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
QWEN = dict(**BASE, **ATTENTION, **GDN, rope_theta=1000.0, partial_rotary_factor=0.5)
MLA = {"kv_lora_rank": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
MAMBA2 = {
    "mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_n_heads": 4, "mamba_d_state": 32, "mamba_n_groups": 2,
    "mamba_d_conv": 4,
}  # fmt: skip
BAILING = dict(
    **BASE, **MOE, num_attention_heads=4, norm_topk_prob=True, num_shared_experts=1, group_norm_size=2,
    rope_theta=1000.0, first_k_dense_replace=1, layer_group_size=2, max_position_embeddings=1000,
)  # fmt: skip
LFM = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "norm_eps": 1e-5, "vocab_size": 320,
    "full_attn_idxs": [1, 3], "rope_theta": 10000.0, "max_position_embeddings": 1000, "conv_bias": True, "conv_L_cache": 3,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": dict(**QWEN, **MOE, decoder_sparse_step=1, shared_expert_intermediate_size=48, mlp_only_layers=[0]),
    "qwen3_5": QWEN,
    "qwen3_5_moe": dict(**QWEN, **MOE, shared_expert_intermediate_size=48),
    "kimi_linear": dict(
        **BASE, **MOE, **MLA, num_attention_heads=4, num_key_value_heads=4, head_dim=16, rope_theta=100.0,
        linear_attn_config={"num_heads": 4, "head_dim": 32, "kda_layers": [1, 2, 4]}, model_max_length=1000,
    ),
    "kimi_k3": dict(
        **BASE, **MOE, **MLA, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, activation_situ_beta=4.0,
        linear_attn_config={
            "num_heads": 4, "head_dim": 32, "kda_layers": [1, 2, 4], "full_attn_layers": [3], "gate_lower_bound": -5.0, "short_conv_kernel_size": 4,
        },
        num_experts_per_token=2, attn_res_block_size=2,
    ),
    "bailing_moe_v3": dict(
        **BASE, **MOE, **MLA, num_attention_heads=4, head_dim=32, n_group=1, topk_group=1, layer_group_size=2,
        moe_shared_expert_intermediate_size=48, q_lora_rank=16,
    ),
    "olmo_hybrid": dict(
        **BASE, **ATTENTION, **GDN, linear_allow_neg_eigval=True, tie_word_embeddings=False, attention_bias=False,
    ),
    "mamba2": {
        "num_heads": 4, "head_dim": 16, "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "state_size": 32,
        "num_hidden_layers": 3, "layer_norm_epsilon": 1e-5, "conv_kernel": 4, "n_groups": 2, "use_bias": False, "use_conv_bias": True,
        "tie_word_embeddings": True, "time_step_limit": (0.001, 100.0), "time_step_rank": "auto",
    },
    "nemotron_h": {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "max_position_embeddings": 1000,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": False, "mamba_num_heads": 4, "mamba_head_dim": 16,
        "mamba_proj_bias": False, "ssm_state_size": 32, "conv_kernel": 4, "n_groups": 2, "time_step_limit": [0.001, 100.0],
        "mlp_bias": False, "layer_norm_epsilon": 1e-5, "use_bias": True, "use_conv_bias": True, "residual_in_fp32": True,
        "hybrid_override_pattern": ["M", "-", "*", "M", "-"],
    },
    "granitemoehybrid": dict(
        **BASE, max_position_embeddings=1000, num_attention_heads=4, num_key_value_heads=2, attention_bias=False,
        embedding_multiplier=1.0, attention_multiplier=0.25, logits_scaling=1.0, residual_multiplier=1.0,
        num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=96, mamba_n_heads=4, mamba_d_head=16,
        mamba_proj_bias=False, mamba_d_state=32, mamba_d_conv=4, mamba_n_groups=2, mamba_conv_bias=True,
        layer_types=["mamba", "attention", "mamba", "attention"], rope_theta=1000.0,
    ),
    "falcon_h1": dict(**BASE, **ATTENTION, **MAMBA2),
    "plamo2": dict(
        **BASE, num_attention_heads=4, num_key_value_heads=2, hidden_size_per_head=16, mamba_d_state=32,
        mamba_d_conv=4, mamba_num_heads=4,
    ),
    "lfm2": dict(
        **LFM, block_dim=64, block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=True, block_ff_dim=128, block_multiple_of=32,
    ),
    "lfm2_moe": dict(
        **LFM, **MOE, intermediate_size=96, num_dense_layers=2, norm_topk_prob=True, use_expert_bias=True,
    ),
    "lfm2-vl": {
        "text_config": dict(
            **LFM, model_type="lfm2", block_dim=64, block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=True,
            block_ff_dim=128, block_multiple_of=32,
        ),
        "vocab_size": 320,
    },
    "gear": dict(
        **BASE, **ATTENTION, sliding_window=8, conv_L_cache=3,
        layer_types=["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"],
    ),
    "mamba": {
        "vocab_size": 320, "use_bias": False, "use_conv_bias": True, "conv_kernel": 4, "hidden_size": 64, "num_hidden_layers": 3,
        "state_size": 16, "intermediate_size": 128, "time_step_rank": 8,
    },
    "falcon_mamba": {
        "vocab_size": 320, "use_bias": False, "use_conv_bias": True, "conv_kernel": 4, "hidden_size": 64, "num_hidden_layers": 3,
        "state_size": 16, "intermediate_size": 128, "time_step_rank": 8, "use_bcdt_rms": True,
    },
    "jamba": dict(
        **BASE, num_attention_heads=4, num_key_value_heads=2, attn_layer_offset=1, attn_layer_period=2,
        expert_layer_offset=1, expert_layer_period=2, mamba_d_conv=4, mamba_d_state=16, mamba_expand=2,
        num_experts=4, num_experts_per_tok=2, max_position_embeddings=1000,
    ),
    "recurrent_gemma": dict(
        **BASE, attention_bias=False, conv1d_width=4, logits_soft_cap=30.0, num_attention_heads=4,
        num_key_value_heads=1, rope_theta=10000.0, attention_window_size=8,
        block_types=["recurrent", "recurrent", "attention"],
    ),
    "rwkv7": {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "norm_eps": 1e-5, "head_dim": 32, "num_hidden_layers": 3,
        "a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16,
    },
    "bailing_moe_linear": dict(**BAILING, num_key_value_heads=4),
    "bailing_hybrid": dict(
        **BAILING, **MLA, num_key_value_heads=4, head_dim=16, n_group=1, topk_group=1, routed_scaling_factor=1.0,
    ),
    "baichuan_m1": dict(
        **BASE, num_attention_heads=4, num_key_value_heads=2, rope_theta=1000.0, sliding_window=8,
        sliding_window_layers=[0, 2], conv_window=2,
    ),
    "longcat_flash_ngram": {
        "attention_method": "MLA", "zero_expert_type": "identity", "hidden_size": 72, "ffn_hidden_size": 96, "moe_topk": 2,
        "expert_ffn_hidden_size": 48, "n_routed_experts": 4, "zero_expert_num": 2, "num_layers": 2, "num_hidden_layers": 2,
        "vocab_size": 320, "max_position_embeddings": 1000, "num_attention_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    },
}  # fmt: skip
FILES = {"falcon_mamba": "mamba"}
KEPT_IN_FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias")


def build(name: str, dtype: mx.Dtype = mx.float32, *, seed: int = 7) -> Module:
    """All weights are random, because zeros or ones would hide errors."""
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{FILES.get(name, name)}")
    config = {"model_type": name, **copy.deepcopy(CONFIGS[name])}
    model: Module = module.Model(module.ModelArgs.from_dict(config))
    weights = []
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for path, value in parameters.items():
        if not mx.issubdtype(value.dtype, mx.floating):
            continue
        if value.size > 1 and (value == value.flatten()[0]).all().item():
            value = value + 0.3 * mx.random.normal(value.shape)  # noqa: PLW2901
        if path.endswith(KEPT_IN_FLOAT32):
            weights.append((path, value.astype(mx.float32)))
            continue
        if "embed" in path or "lm_head" in path:
            value = mx.random.normal(value.shape) * (0.3 if "lm_head" in path else 1.0)  # noqa: PLW2901
        weights.append((path, value.astype(dtype)))
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def make_folder(folder: Path, name: str, dtype: mx.Dtype = mx.float32, **changes: Any) -> Path:
    """Write a model folder with a byte tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(build(name, dtype).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = {"max_position_embeddings": 512, **copy.deepcopy(CONFIGS[name]), "model_type": name}
    config |= {"eos_token_id": tiny_models.VOCAB_SIZE - 1} | changes
    (folder / "config.json").write_text(json.dumps(config))
    tiny_models.make_tokenizer(folder)
    return folder
