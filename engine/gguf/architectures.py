"""Model configurations and tensor names for GGUF architectures.

Source of the names: the GGUF specification and the constants of the package ``gguf``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..api.errors import ModelLoadError

_LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_KNOWN_KEYS = {
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.layer_norm_rms_epsilon", "attention.value_length", "block_count", "context_length",
    "embedding_length", "feed_forward_length", "rope.dimension_count", "rope.freq_base",
    "rope.scaling.attn_factor", "rope.scaling.factor",
    "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.type", "vocab_size",
}  # fmt: skip


class Metadata:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.architecture = str(values.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def of(self, key: str, default: Any = None) -> Any:
        name = f"{self.architecture}.{key}"
        value = self.values.get(name, default)
        if value is None:
            raise ModelLoadError(
                f"the GGUF file has no {name}; convert the model again with a current llama.cpp"
            )
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelLoadError(
                    f"{name} must be the same in every layer, got {value}; use another model"
                )
            return value[0]
        return value


@dataclass(frozen=True, slots=True)
class Architecture:
    model_type: str
    names: Mapping[str, str] = field(default_factory=lambda: _LLAMA_NAMES)
    extra: Callable[[Metadata], dict[str, Any]] = lambda _: {}
    keys: frozenset[str] = frozenset()
    permuted: bool = False
    norm_offset: float = 0.0
    dtype: str = "float16"


def _granite(meta: Metadata) -> dict[str, Any]:
    if not meta.of("rope.scaling.finetuned", True):
        raise ModelLoadError(
            f"{meta.architecture}.rope.scaling.finetuned must be true, got false: mlx-lm's model always uses "
            "rotary embeddings; give a folder of the model in safetensors"
        )
    return {
        "attention_bias": False,
        "mlp_bias": False,
        "logits_scaling": meta.of("logit_scale"),
        "attention_multiplier": meta.of("attention.scale"),
        "embedding_multiplier": meta.of("embedding_scale"),
        "residual_multiplier": meta.of("residual_scale"),
    }


def _granite_moe(meta: Metadata) -> dict[str, Any]:
    return {
        **_granite(meta),
        "num_local_experts": meta.of("expert_count"),
        "num_experts_per_tok": meta.of("expert_used_count"),
    }


def _qwen3_moe(meta: Metadata) -> dict[str, Any]:
    return {
        "num_experts": meta.of("expert_count"),
        "num_experts_per_tok": meta.of("expert_used_count"),
        "moe_intermediate_size": meta.of("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _gemma3(meta: Metadata) -> dict[str, Any]:
    heads, width = meta.of("attention.head_count"), meta.of("embedding_length")
    is_27b = meta.of("block_count") == 62
    return {
        "sliding_window": meta.of("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": width // heads if is_27b else meta.of("attention.key_length"),
    }


_SCALES = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})
_EXPERTS = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})


def _experts(folder: str, router: str) -> dict[str, str]:
    named = {f"ffn_{name}_exps": f"{folder}.switch_mlp.{name}_proj" for name in ("gate", "up", "down")}
    return {**_LLAMA_NAMES, **named, "ffn_gate_inp": f"{folder}.{router}"}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", _experts("mlp", "gate"), _qwen3_moe, _EXPERTS),
    "gemma3": Architecture(
        "gemma3_text",
        {
            **_LLAMA_NAMES,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _gemma3,
        frozenset({"attention.sliding_window"}),
        norm_offset=1.0,
        dtype="bfloat16",  # activations exceed float16's largest number
    ),
    "phi3": Architecture(
        "phi3",
        {**_LLAMA_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        keys=frozenset({"attention.sliding_window"}),
    ),
    "smollm3": Architecture("smollm3", permuted=True),
    "granite": Architecture("granite", extra=_granite, keys=_SCALES, permuted=True),
    "granitemoe": Architecture(
        "granitemoe",
        _experts("block_sparse_moe", "router.layer"),
        _granite_moe,
        _SCALES | _EXPERTS,
        permuted=True,
    ),
}


def architecture_of(meta: Metadata) -> Architecture:
    name = meta.architecture
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"a GGUF file's architecture must be one of {', '.join(sorted(ARCHITECTURES))}, got {name!r}; "
            "give a folder of the model in safetensors"
        )
    known, architecture = _KNOWN_KEYS, ARCHITECTURES[name]
    for key, value in meta.values.items():
        rest = key.removeprefix(f"{name}.")
        usual: tuple[Any, ...] = (True,) if rest == "attention.causal" else (0, False, [], None)
        if rest != key and rest not in known | architecture.keys and value not in usual:
            raise ModelLoadError(
                f"{key} = {str(value)[:60]} has no counterpart in mlx-lm's {architecture.model_type!r}; "
                "give a folder of the model in safetensors"
            )
    return architecture


def config_of(
    meta: Metadata, tensors: Mapping[str, npt.NDArray[Any]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Return the content of config.json.

    tensors  ``rope_*`` tensors by name, float32
    shapes   shapes of all tensors, outermost dimension first

    Raises ModelLoadError for models that mlx-lm cannot compute.
    """
    architecture = architecture_of(meta)
    heads, width = meta.of("attention.head_count"), meta.of("embedding_length")
    head_dim = meta.of("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.of(key, head_dim) != head_dim and architecture.model_type != "phi3":
            raise ModelLoadError(
                f"{meta.architecture}.{key} must be the head size {head_dim}, got {meta.of(key)}; give a "
                "folder of the model in safetensors"
            )
    config = {
        "model_type": architecture.model_type,
        "hidden_size": width,
        "num_hidden_layers": meta.of("block_count"),
        "intermediate_size": meta.of("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.of("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": meta.of("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.of("rope.freq_base", 10_000.0),
        "max_position_embeddings": meta.of("context_length"),
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        **architecture.extra(meta),
    }
    if architecture.model_type == "phi3":
        config["partial_rotary_factor"] = meta.of("rope.dimension_count", head_dim) / head_dim
    scaling = _rope_scaling(meta, tensors, config)
    return {**config, "rope_scaling": scaling} if scaling else config


def _rope_scaling(
    meta: Metadata, tensors: Mapping[str, npt.NDArray[Any]], config: dict[str, Any]
) -> dict[str, Any] | None:
    kind = meta.of("rope.scaling.type", "none")
    factor = meta.of("rope.scaling.factor", 1.0)
    trained = meta.of("rope.scaling.original_context_length", config["max_position_embeddings"])
    is_long, usual = "rope_factors_long.weight" in tensors, 1.0
    if is_long and (ratio := config["max_position_embeddings"] / trained) > 1:
        usual = math.sqrt(1 + math.log(ratio) / math.log(trained))
    if not math.isclose(given := meta.of("rope.scaling.attn_factor", usual), usual, rel_tol=1e-3):
        raise ModelLoadError(
            f"{meta.architecture}.rope.scaling.attn_factor must be {usual:.4g}, got {given:.4g}; give a "
            "folder of the model in safetensors"
        )
    if is_long:
        config["original_max_position_embeddings"] = trained
        return {
            "type": "longrope",
            "original_max_position_embeddings": trained,
            **{
                f"{name}_factor": tensors[f"rope_factors_{name}.weight"].tolist()
                for name in ("long", "short")
            },
        }
    if "rope_freqs.weight" in tensors:
        return _llama3(tensors["rope_freqs.weight"], config)
    if kind == "none":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": factor}
    if kind == "yarn":
        return {"type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
    raise ModelLoadError(
        f"{meta.architecture}.rope.scaling.type must be none, linear or yarn, got {kind!r}; give a folder "
        "of the model in safetensors"
    )


def _llama3(factors: npt.NDArray[Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of Llama 3's rotary scaling from GGUF's frequency divisors."""
    dims = 2 * len(factors)
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(0, dims, 2) / dims)
    factor, low, high, trained = float(round(factors.max())), 1.0, 4.0, 8192
    smooth = np.clip((trained / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(expected, factors, rtol=1e-3):
        raise ModelLoadError(
            "rope_freqs.weight must be Llama 3's frequency divisors, got others; give a folder of the "
            "model in safetensors"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }


def tensor_name(architecture: Architecture, name: str) -> str:
    *place, stem, kind = name.split(".")
    if not place and stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}"
    if len(place) == 2 and place[0] == "blk" and stem in architecture.names:
        return f"model.layers.{int(place[1])}.{architecture.names[stem]}.{kind}"
    raise ModelLoadError(
        f"tensor {name!r} has no counterpart in mlx-lm's {architecture.model_type!r}; give a folder of "
        "the model in safetensors"
    )
