"""Tiny models with an MTP head, in the layout of publishers, and the head in NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

import tiny_models

Floats = npt.NDArray[np.float64]
Tensors = dict[str, mx.array]

GLM: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "norm_topk_prob": True, "rope_scaling": None, "use_qk_norm": True, "attention_bias": False,
    "partial_rotary_factor": 0.5, "num_hidden_layers": 2,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
QWEN_NEXT = {
    **QWEN,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
}
CONFIGS = {
    "glm4_moe": GLM,
    "qwen3_next": QWEN_NEXT,
    "qwen3_5": QWEN,
    "deepseek_v3": {"num_hidden_layers": 61},
}
LAYER_NORMS = (
    "input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight",
)  # fmt: skip
# Weights that are set to zero, so that layers add nothing to their input.
SILENT = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
DIM, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 128
EPS = 1e-5
QWENS = ("qwen3_5", "qwen3_next")


def make_model(
    folder: Path, architecture: str, *, agrees: bool = False, dtype: mx.Dtype = mx.bfloat16
) -> Path:
    tiny_models.make_model(folder, architecture, dtype=dtype, **CONFIGS[architecture])
    head = {name: value.astype(dtype) for name, value in _head(architecture).items()}
    if architecture == "qwen3_next":
        mx.save_safetensors(str(folder / "model.safetensors"), _as_published(_load(folder)))
    if agrees:
        weights = _load(folder)
        for tensors in (weights, head):
            silent = [name for name in tensors if name.endswith(SILENT)]
            tensors |= {name: mx.zeros_like(tensors[name]) for name in silent}
        (norm,) = [value for name, value in weights.items() if name.endswith("model.norm.weight")]
        shift = 1.0 if architecture in QWENS else 0.0
        norm = norm + 1.0 if architecture == "qwen3_next" else norm
        one = mx.full((DIM,), 1.0 - shift, dtype)
        names = _names(architecture)
        head |= {names["embedding_norm"]: one, names["hidden_norm"]: one, names["norm"]: norm - shift}
        head[names["projection"]] = mx.concatenate([mx.eye(DIM), mx.zeros((DIM, DIM))], -1).astype(dtype)
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
    mx.save_safetensors(str(folder / "model-head.safetensors"), head)
    return folder


def _as_published(weights: Tensors) -> Tensors:
    """Write weights as published, because mlx-lm drops the head only when it rearranges weights."""
    published: Tensors = {}
    for name, value in weights.items():
        if ".switch_mlp." in name:
            published |= {name.replace("switch_mlp", f"experts.{i}"): value[i] for i in range(value.shape[0])}
        elif name.endswith("conv1d.weight"):
            published[name] = value.moveaxis(2, 1)
        elif name.endswith((*LAYER_NORMS, "model.norm.weight")):
            published[name] = value - 1.0
        else:
            published[name] = value
    return published


def _load(folder: Path) -> Tensors:
    weights: Tensors = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    mx.eval(weights)
    return weights


def _names(architecture: str) -> dict[str, str]:
    if architecture in QWENS:
        return {
            "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
            "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
            "projection": "mtp.fc.weight",
            "norm": "mtp.norm.weight",
            "layer": "mtp.layers.0.",
        }
    layer = f"model.layers.{CONFIGS[architecture]['num_hidden_layers']}."
    return {
        "embedding_norm": f"{layer}enorm.weight",
        "hidden_norm": f"{layer}hnorm.weight",
        "projection": f"{layer}eh_proj.weight",
        "norm": f"{layer}shared_head.norm.weight",
        "layer": layer,
    }


def _head(architecture: str) -> Tensors:
    mx.random.seed(5)
    names, center = _names(architecture), 0.0 if architecture in QWENS else 1.0
    shapes: dict[str, tuple[int, ...]] = {
        names["embedding_norm"]: (DIM,),
        names["hidden_norm"]: (DIM,),
        names["norm"]: (DIM,),
        names["projection"]: (DIM, 2 * DIM),
    }
    shapes |= {names["layer"] + name: shape for name, shape in _layer_shapes(architecture).items()}
    if architecture not in QWENS:
        shapes[names["layer"] + "embed_tokens.weight"] = (tiny_models.VOCAB_SIZE, DIM)
        shapes[names["layer"] + "shared_head.head.weight"] = (tiny_models.VOCAB_SIZE, DIM)
    return {
        name: mx.random.normal(shape) * (0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5)
        + (center if name.endswith("norm.weight") else 0.0)
        for name, shape in shapes.items()
    }


def _layer_shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (DIM,),
        "post_attention_layernorm.weight": (DIM,),
        "self_attn.o_proj.weight": (DIM, HEADS * HEAD_DIM),
    }
    if architecture == "deepseek_v3":
        shapes |= {
            "self_attn.q_a_proj.weight": (24, DIM),
            "self_attn.q_a_layernorm.weight": (24,),
            "self_attn.q_b_proj.weight": (HEADS * 24, 24),
            "self_attn.kv_a_proj_with_mqa.weight": (24, DIM),
            "self_attn.kv_a_layernorm.weight": (16,),
            "self_attn.kv_b_proj.weight": (HEADS * 32, 16),
        }
    else:
        queries = HEADS * HEAD_DIM * (2 if architecture in QWENS else 1)
        shapes |= {
            "self_attn.q_proj.weight": (queries, DIM),
            "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, DIM),
            "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, DIM),
            "self_attn.q_norm.weight": (HEAD_DIM,),
            "self_attn.k_norm.weight": (HEAD_DIM,),
        }
    if architecture == "qwen3_5":
        return shapes | _mlp_shapes("mlp.", INNER)
    if architecture == "qwen3_next":
        shapes |= {"mlp.gate.weight": (4, DIM), "mlp.shared_expert_gate.weight": (1, DIM)}
        for i in range(4):
            shapes |= _mlp_shapes(f"mlp.experts.{i}.", 64)
        return shapes | _mlp_shapes("mlp.shared_expert.", 48)
    inner = 32 if architecture == "deepseek_v3" else 64
    shapes |= {"mlp.gate.weight": (4, DIM), "mlp.gate.e_score_correction_bias": (4,)}
    for part in (*(f"experts.{i}." for i in range(4)), "shared_experts."):
        shapes |= _mlp_shapes(f"mlp.{part}", inner)
    return shapes


def _mlp_shapes(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, DIM),
        f"{prefix}up_proj.weight": (inner, DIM),
        f"{prefix}down_proj.weight": (DIM, inner),
    }


class NumpyHead:
    """The head of a ``make_model`` model in float64, for one sequence from its beginning."""

    def __init__(self, folder: Path) -> None:
        self._architecture = json.loads((folder / "config.json").read_text())["model_type"]
        files = [mx.load(str(folder / name)) for name in ("model.safetensors", "model-head.safetensors")]
        self._weights = {
            name: np.array(value.astype(mx.float32)).astype(np.float64)
            for file in files
            for name, value in file.items()  # type: ignore[union-attr]
        }
        self._names = _names(self._architecture)

    def __call__(self, tokens: list[int], hidden: npt.NDArray[np.float32]) -> tuple[Floats, Floats]:
        """Return logits [T, V] and outputs [T, D]; ``tokens[i]`` follows the position of ``hidden[i]``."""
        weights, names = self._weights, self._names
        (embedding,) = [
            value
            for name, value in weights.items()
            if name.endswith("model.embed_tokens.weight") and "layers" not in name
        ]
        (output,) = [value for name, value in weights.items() if name.endswith("lm_head.weight")]
        embedded = self._norm(embedding[tokens], names["embedding_norm"])
        both = np.concatenate(
            [embedded, self._norm(hidden.astype(np.float64), names["hidden_norm"])], axis=-1
        )
        x = both @ weights[names["projection"]].T
        x = x + self._attention(self._norm(x, names["layer"] + "input_layernorm.weight"))
        x = x + self._mlp(self._norm(x, names["layer"] + "post_attention_layernorm.weight"))
        y = self._norm(x, names["norm"])
        logits: Floats = y @ output.T
        return logits, y

    def _norm(self, x: Floats, name: str) -> Floats:
        weight = self._weights[name] + (1.0 if self._architecture in QWENS else 0.0)
        normed: Floats = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight
        return normed

    def _of_layer(self, name: str) -> Floats:
        return self._weights[f"{self._names['layer']}{name}.weight"]

    def _attention(self, x: Floats) -> Floats:
        count = len(x)
        queries = (x @ self._of_layer("self_attn.q_proj").T).reshape(count, HEADS, -1)
        gate = np.ones((count, HEADS * HEAD_DIM))
        if self._architecture in QWENS:
            queries, raw = np.split(queries, 2, axis=-1)
            gate = 1 / (1 + np.exp(-raw.reshape(count, -1)))
        keys = (x @ self._of_layer("self_attn.k_proj").T).reshape(count, KV_HEADS, HEAD_DIM)
        values = (x @ self._of_layer("self_attn.v_proj").T).reshape(count, KV_HEADS, HEAD_DIM)
        queries = _rotated(self._norm(queries, self._names["layer"] + "self_attn.q_norm.weight"))
        keys = _rotated(self._norm(keys, self._names["layer"] + "self_attn.k_norm.weight"))
        keys, values = np.repeat(keys, HEADS // KV_HEADS, 1), np.repeat(values, HEADS // KV_HEADS, 1)
        scores = np.einsum("thd,shd->hts", queries, keys) * HEAD_DIM**-0.5
        scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hts,shd->thd", weights, values).reshape(count, -1)
        attended: Floats = (out * gate) @ self._of_layer("self_attn.o_proj").T
        return attended

    def _mlp(self, x: Floats) -> Floats:
        if self._architecture == "qwen3_5":
            return self._swiglu(x, "mlp.")
        if self._architecture == "qwen3_next":
            return self._mixture(x)
        scores = 1 / (1 + np.exp(-x @ self._of_layer("mlp.gate").T))
        bias = self._weights[f"{self._names['layer']}mlp.gate.e_score_correction_bias"]
        out = self._swiglu(x, "mlp.shared_experts.")
        for row, own in enumerate(scores):
            chosen = np.argsort(-(own + bias))[: GLM["num_experts_per_tok"]]
            for expert in chosen:
                share = own[expert] / own[chosen].sum() * GLM["routed_scaling_factor"]
                out[row] += share * self._swiglu(x[row], f"mlp.experts.{expert}.")
        return out

    def _mixture(self, x: Floats) -> Floats:
        """Qwen3-Next: softmax over experts, chosen weights that sum to 1, plus a gated shared expert."""
        raw = np.exp(x @ self._of_layer("mlp.gate").T)
        shared = 1 / (1 + np.exp(-x @ self._of_layer("mlp.shared_expert_gate").T))
        out = shared * self._swiglu(x, "mlp.shared_expert.")
        for row, own in enumerate(raw):
            chosen = np.argsort(-own)[: QWEN_NEXT["num_experts_per_tok"]]
            for expert in chosen:
                out[row] += own[expert] / own[chosen].sum() * self._swiglu(x[row], f"mlp.experts.{expert}.")
        return out

    def _swiglu(self, x: Floats, prefix: str) -> Floats:
        gate = x @ self._of_layer(f"{prefix}gate_proj").T
        inner = gate / (1 + np.exp(-gate)) * (x @ self._of_layer(f"{prefix}up_proj").T)
        down: Floats = inner @ self._of_layer(f"{prefix}down_proj").T
        return down


def _rotated(x: Floats) -> Floats:
    half = HEAD_DIM // 4
    angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
