"""A plain-torch Qwen3.5 text decoder: three gated-delta layers, then one of attention.

Parameter names are the Hugging Face ones. The recurrence is computed in chunks (the WY form of Yang et al.,
"Gated Delta Networks", arXiv:2412.06464): inside a chunk its tokens are one triangular system, and only the
state goes from chunk to chunk.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_model.network import MLP, RMSNorm, rope_tables, rotate

CHUNK = 64  # tokens of one triangular system


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """The fields of config.json that decide the shape; names as Hugging Face has them."""

    vocab_size: int = 1536
    hidden_size: int = 256
    num_hidden_layers: int = 4
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    intermediate_size: int = 448
    max_position_embeddings: int = 8192
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25
    rms_norm_eps: float = 1e-6

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)

    @property
    def key_width(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim


def gated_delta(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Outputs of ``S <- exp(g) S; S <- S + beta k (v - S^T k)^T; o = S^T q`` from an empty state.

    q, k [B, H, T, K], v [B, H, T, V], log_decay and beta [B, H, T]; float32. Returns [B, H, T, V].
    """
    length = q.shape[2]
    padding = -length % CHUNK
    if padding:  # tokens that write nothing: beta 0, no decay
        q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
        log_decay, beta = (F.pad(x, (0, padding)) for x in (log_decay, beta))
    q, k, v, log_decay, beta = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v, log_decay, beta))
    since = log_decay.cumsum(-1)  # decay from the chunk's start to behind each token
    gap = (since[..., :, None] - since[..., None, :]).tril()
    decay = gap.exp().tril()
    system = (beta[..., None] * decay * (k @ k.transpose(-1, -2))).tril(-1)
    right = torch.cat((beta[..., None] * v, (beta * since.exp())[..., None] * k), dim=-1)
    identity = torch.eye(CHUNK, dtype=q.dtype)
    solved = torch.linalg.solve_triangular(system + identity, right, upper=False, unitriangular=True)
    fresh, seen = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = decay * (q @ k.transpose(-1, -2))
    q = q * since.exp()[..., None]
    k = k * (since[..., -1:] - since).exp()[..., None]
    last = since[..., -1].exp()[..., None, None]
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for chunk in range(q.shape[2]):
        update = fresh[:, :, chunk] - seen[:, :, chunk] @ state
        outputs.append(q[:, :, chunk] @ state + scores[:, :, chunk] @ update)
        state = last[:, :, chunk] * state + k[:, :, chunk].transpose(-1, -2) @ update
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :length]


class GatedDelta(nn.Module):
    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        width, heads = config.hidden_size, config.linear_num_value_heads
        channels = 2 * config.key_width + config.value_width
        self.in_proj_qkv = nn.Linear(width, channels, bias=False)
        self.in_proj_z = nn.Linear(width, config.value_width, bias=False)
        self.in_proj_b = nn.Linear(width, heads, bias=False)
        self.in_proj_a = nn.Linear(width, heads, bias=False)
        taps = config.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(channels, channels, taps, groups=channels, bias=False)
        step = torch.exp(torch.linspace(-6.9, -2.3, heads))  # decays per token, slow to fast
        self.dt_bias = nn.Parameter(step.expm1().log())
        self.A_log = nn.Parameter(torch.linspace(1, 8, heads).log())
        self.norm = RMSNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(config.value_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        mixed = self.in_proj_qkv(x).transpose(1, 2).float()
        mixed = F.pad(mixed, (config.linear_conv_kernel_dim - 1, 0))
        mixed = F.silu(self.conv1d(mixed).float()).transpose(1, 2)
        q, k, v = mixed.split((config.key_width, config.key_width, config.value_width), dim=-1)
        q, k = (t.unflatten(-1, (config.linear_num_key_heads, -1)) for t in (q, k))
        v = v.unflatten(-1, (config.linear_num_value_heads, -1))
        q = F.normalize(q, dim=-1) * config.linear_key_head_dim**-0.5
        k = F.normalize(k, dim=-1)
        repeats = config.linear_num_value_heads // config.linear_num_key_heads
        q, k = (t.repeat_interleave(repeats, dim=2) for t in (q, k))
        log_decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        beta = self.in_proj_b(x).float().sigmoid()
        with torch.autocast("cpu", enabled=False):
            parts = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            out = gated_delta(*parts, log_decay.transpose(1, 2), beta.transpose(1, 2)).transpose(1, 2)
        gate = self.in_proj_z(x).unflatten(-1, (config.linear_num_value_heads, -1))
        return self.out_proj((self.norm(out) * F.silu(gate.float())).to(x.dtype).flatten(2))


class GatedAttention(nn.Module):
    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, 2 * config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        q, gate = self.q_proj(x).unflatten(-1, (heads, -1)).chunk(2, dim=-1)
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (kv_heads, -1))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (kv_heads, -1)).transpose(1, 2)
        turned = 2 * cos.shape[-1]  # dimensions of a head that positions turn
        q, k = (torch.cat((rotate(t[..., :turned], cos, sin), t[..., turned:]), dim=-1) for t in (q, k))
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.o_proj(out * gate.flatten(2).sigmoid())


class Block(nn.Module):
    def __init__(self, config: HybridConfig, index: int) -> None:
        super().__init__()
        self.is_linear = (index + 1) % config.full_attention_interval != 0
        if self.is_linear:
            self.linear_attn = GatedDelta(config)
        else:
            self.self_attn = GatedAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + (self.linear_attn(normed) if self.is_linear else self.self_attn(normed, cos, sin))
        return x + self.mlp(self.post_attention_layernorm(x))


class HybridTrunk(nn.Module):
    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Hybrid(nn.Module):
    """``state_dict()`` uses Hugging Face names: model.layers.0.linear_attn.in_proj_qkv.weight, ..."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.model = HybridTrunk(config)
        turned = int(config.head_dim * config.partial_rotary_factor)
        cos, sin = rope_tables(turned, config.rope_theta, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # every block starts as the identity
            elif name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
                nn.init.normal_(parameter, std=0.1 * parameter.shape[1] ** -0.5)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.03 if "embed" in name else parameter.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, T, vocab_size] of token ids [B, T]."""
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.bfloat16)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)
