"""Tiny configurations of model architectures.

``ModelArgs.from_dict`` of mlx-lm ignores unknown names, so one dictionary of small values serves most
architectures. ``DIFFERENT`` has values for architectures that need others.
"""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 320
NUM_LAYERS = 4
WINDOW = 12

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_OTHER_NAMES: dict[str, Any] = {
    "n_embd": 64,
    "n_head": 4,
    "n_layer": NUM_LAYERS,
    "n_inner": 128,
    "n_positions": 512,
    "n_ctx": 512,
    "n_kv_heads": 2,
    "n_heads": 4,
    "n_layers": NUM_LAYERS,
    "d_model": 64,
    "num_layers": NUM_LAYERS,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_dim": 64,
    "block_size": 512,
    "ffn_hidden_size": 128,
    "intermediate_size_mlp": 128,
    "ff_intermediate_size": 128,
    "model_max_length": 512,
    "num_attention_groups": 2,
}
_NORMS_AND_POSITIONS: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "rope_traditional": False,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.5,
    "rotary_emb_base": 10000,
    "rotary_dim": 8,
    "swa_rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "qk_norm": True,
    "post_norm": True,
    "hidden_act": "silu",
}
_WINDOWS: dict[str, Any] = {
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_window_size": WINDOW,
    "sliding_window_pattern": 2,
    "sliding_window_layers": [1, 3],
    "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
    "hybrid_layer_pattern": [0, 1] * (NUM_LAYERS // 2),
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 64,
    "expert_ffn_hidden_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "num_shared_expert": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    "use_mixed_mlp_moe": True,
    "num_dense_layers": 1,
    "use_expert_bias": True,
    "is_moe_layer": [False, True] * (NUM_LAYERS // 2),
}
_LATENTS: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 8,  # with fewer heads, index scores would often be equal
    "index_topk": 8,
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_STATES: dict[str, Any] = {
    "layer_group_size": 2,
    "group_norm_size": 1,
    "conv_kernel": 4,
    "conv_bias": False,
    "conv_L_cache": 3,
    "conv_window": 2,
    "conv1d_width": 4,
    "use_conv_bias": True,
    "state_size": 16,
    "ssm_state_size": 16,
    "time_step_rank": 4,
    "time_step_limit": (0.0, 100.0),
    "n_groups": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "full_attention_interval": 2,
    "a_low_rank_dim": 16,
    "v_low_rank_dim": 16,
    "gate_low_rank_dim": 16,
    "decay_low_rank_dim": 16,
    "block_dim": 64,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "logits_soft_cap": 30.0,
}
_SCALES: dict[str, Any] = {
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "dim_model_base": 64,
    "scale_depth": 1.4,
    "scale_emb": 1.0,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 50.0,
    "rope_local_base_freq": 1000.0,
}

EVERYTHING = _SHAPE | _OTHER_NAMES | _NORMS_AND_POSITIONS | _WINDOWS | _EXPERTS | _LATENTS | _STATES | _SCALES
"""Small values for all names that two or more architectures share, and for many others."""

_YARN = {
    "rope_theta": 10000.0,
    "rope_type": "default",
    "type": "default",
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16,
}
_LINEAR_ATTENTION = {
    "kda_layers": [1, 2],
    "full_attn_layers": [3, 4],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}

DIFFERENT: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale_all_dim": 0.0}},
    "exaone4": {"sliding_window_pattern": "LG"},
    "gemma4_text": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "num_experts": None},
    "gemma4": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "num_experts": None},
    "gemma3n": {
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.5] * NUM_LAYERS,
        "altup_num_inputs": 2,
        "altup_coef_clip": 100.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
        "rope_scaling": None,
        "intermediate_size": 128,
        "sliding_window_pattern": 2,
    },
    "glm_moe_dsa": {"rope_parameters": _YARN},
    "granitemoehybrid": {"layer_types": ["attention"] * NUM_LAYERS},
    "hunyuan": {
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "kimi_k3": {"hidden_act": "situ", "num_experts_per_token": 2, "linear_attn_config": _LINEAR_ATTENTION},
    "kimi_linear": {"linear_attn_config": _LINEAR_ATTENTION},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "llama4": {
        "attention_chunk_size": 16,  # a multiple of the page size that the load-time probe uses
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
        "floor_scale": 8,
    },
    "mellum": {"rope_parameters": {"sliding_attention": _YARN, "full_attention": _YARN}},
    "mimo_v2_flash": {"moe_layer_freq": [0, 1, 1, 1]},
    "minimax_m3_vl": {
        "moe_layer_freq": [0, 1, 1, 1],
        "dense_intermediate_size": 128,
        "sparse_attention_config": {
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 16,
            "sparse_block_size": 4,  # short, so that attention skips blocks in the load-time probe
            "sparse_topk_blocks": 2,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1, 1, 1],
        },
    },
    "minicpm3": {
        "rope_scaling": {"original_max_position_embeddings": 512, "short_factor": 1.0, "long_factor": 1.0}
    },
    "ministral3": {"rope_parameters": _YARN},
    "mistral3": {"rope_parameters": _YARN, "model_type": "ministral3"},
    "mistral4": {"rope_parameters": _YARN},
    "muse_spark": {
        "post_norm_eps": 1e-5,
        "rope_parameters": _YARN,
        "layer_rope_theta": [10000.0, 10000.0, 10000.0, 0.0],
        "final_logit_softcapping": 30.0,
        "output_multiplier": 1.0,
        "moe_hidden_size": 64,
        "num_shared_experts": 0,
    },
    "nemotron_h": {"layer_types": ["linear_attention", "full_attention"] * (NUM_LAYERS // 2)},
    "openelm": {
        "num_transformer_layers": NUM_LAYERS,
        "model_dim": 64,
        "ffn_dim_divisor": 8,
        "num_query_heads": [4] * NUM_LAYERS,
        "num_kv_heads": [2] * NUM_LAYERS,
        "ffn_multipliers": [2.0] * NUM_LAYERS,
    },
    "phi3small": {
        "vocab_size": 100_352,  # the model masks some ids, which its vocabulary must contain
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 64,
        "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 2,
    },
    "phixtral": {"num_vocab": VOCAB_SIZE, "model_dim": 64},
    "plamo": {"num_attention_heads": 8, "n_shared_head": 4},
    "qwen": {"kv_channels": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "num_key_value_heads": 1},
    "spark2_5": {
        "hidden_act": "gelu",
        "rope_parameters": {"sliding_attention": _YARN, "full_attention": _YARN},
    },
    "step3p5": {"moe_top_k": 2, "moe_num_experts": 8},
}
"""Values for architectures that interpret a name differently. The keys are mlx-lm's module names."""

_NO_CONFIGURATION = {
    "nemotron-nas": "every block of it is configured on its own",
    "prism_hadamard_qwen35": "it exists as packed weights only",
}
"""Architectures without a tiny configuration, with reasons."""


def configuration(architecture: str) -> dict[str, Any]:
    """Return a tiny config.json as a dictionary. Raises ValueError if there is none."""
    if (reason := _NO_CONFIGURATION.get(architecture)) is not None:
        raise ValueError(reason)
    config = EVERYTHING | {"model_type": architecture} | DIFFERENT.get(architecture, {})
    return config | {"text_config": config | {"model_type": _text_type(architecture)}}


def _text_type(architecture: str) -> str:
    return {
        "mistral3": "ministral3",
        "pixtral": "llama",
        "lfm2-vl": "lfm2",
        "kimi_vl": "deepseek_v3",
        "kimi_k25": "deepseek_v3",
    }.get(architecture, architecture)
