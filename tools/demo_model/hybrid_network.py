"""A plain-torch Olmo hybrid: one layer of attention, then layers of the gated delta rule.

Parameter names are those of Hugging Face. The recurrence is computed in chunks (the WY form of Yang et al.,
"Gated Delta Networks", arXiv:2412.06464). Matrices are multiplied in bf16; triangular systems are solved in
float32.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_model.network import MLP, rotate

CHUNK = 128
TAPS = 4  # taps of a convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    vocab_size: int = 1536
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 32
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 2
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = TAPS
    intermediate_size: int = 256
    max_position_embeddings: int = 8192
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)

    @property
    def key_width(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim


class UnitLowerInverse(torch.autograd.Function):
    """Inverse of I + A for strictly lower triangular A [..., n, n]; n is a power of two.

    Diagonal blocks of size 16 are inverted by repeated squaring, then pairs of blocks are joined.
    """

    @staticmethod
    def forward(ctx, a):  # type: ignore[no-untyped-def]
        inverse = inverse_of(a)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        turned = ctx.saved_tensors[0].transpose(-1, -2)
        return -(turned @ gradient @ turned)


def inverse_of(a: Tensor) -> Tensor:
    size = a.shape[-1]
    if size > 16:
        half = size // 2
        blocks = torch.stack((a[..., :half, :half], a[..., half:, half:]), 0)
        first, second = inverse_of(blocks)
        inverse = torch.zeros_like(a)
        inverse[..., :half, :half], inverse[..., half:, half:] = first, second
        inverse[..., half:, :half] = -(second @ (a[..., half:, :half] @ first))
        return inverse
    power, inverse = -a, torch.eye(size) - a
    for _ in range(size.bit_length() - 2):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


def gated_delta(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Return outputs o of ``S <- exp(g) S; S <- S + beta k (v - S^T k)^T; o = S^T q``; S is zero at first.

    Shapes: q and k [B, H, T, K]; v [B, H, T, V]; log_decay (g) and beta float32 [B, H, T]; o [B, H, T, V]. T
    must be at most CHUNK or a multiple of CHUNK.
    """
    narrow, size = q.dtype, min(q.shape[2], CHUNK)
    q, k, v, log_decay, beta = (x.unflatten(2, (-1, size)) for x in (q, k, v, log_decay, beta))
    since = log_decay.cumsum(-1)
    above = torch.full((size, size), -torch.inf).triu(1)
    decay = (since[..., :, None] - since[..., None, :]).add_(above).exp_().to(narrow)
    turned = k.transpose(-1, -2)
    system = torch.tril((k @ turned) * decay * beta.to(narrow)[..., None], -1).float()
    inverse = UnitLowerInverse.apply(system).to(narrow)
    fresh = inverse @ (beta.to(narrow)[..., None] * v)
    scores = (q @ turned) * decay
    if q.shape[2] == 1:
        return (scores @ fresh)[:, :, 0]
    grown = since.exp()[..., None]
    seen = inverse @ (k * (beta[..., None] * grown).to(narrow))
    q = q * grown.to(narrow)
    turned = (k * (since[..., -1:] - since).exp()[..., None].to(narrow)).transpose(-1, -2)
    last = grown[..., -1:, :]
    state = v.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1], dtype=torch.float32)
    outputs = []
    for chunk in range(q.shape[2]):
        held = state.to(narrow)
        update = fresh[:, :, chunk] - seen[:, :, chunk] @ held
        outputs.append(q[:, :, chunk] @ held + scores[:, :, chunk] @ update)
        state = last[:, :, chunk] * state + turned[:, :, chunk] @ update
    return torch.stack(outputs, 2).flatten(2, 3)


class Normed(torch.autograd.Function):
    """RMS norm without weights: x / sqrt(mean(x^2) + 1e-6) along the last dimension."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_() / x.shape[-1]
        scale = mean.add_(1e-6).rsqrt_().to(x.dtype)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        y, scale = ctx.saved_tensors
        along = (gradient * y).mean(-1, keepdim=True)
        return torch.addcmul(gradient, y, along, value=-1).mul_(scale)


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return Normed.apply(x) * self.weight.to(x.dtype)


def convolve(x: Tensor, taps: Tensor) -> Tensor:
    """Convolve each channel causally, and apply SiLU; x [B, T, channels], taps [channels, 1, TAPS]."""
    padded = F.pad(x, (0, 0, TAPS - 1, 0)).transpose(1, 2).unsqueeze(2)
    out = F.conv2d(padded, taps.unsqueeze(2).to(x.dtype), groups=taps.shape[0])
    return F.silu(out.squeeze(2).transpose(1, 2))


class ShortConvolution(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.05 * torch.randn(channels, 1, TAPS))


class GatedDelta(nn.Module):
    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        width, heads = config.hidden_size, config.linear_num_value_heads
        self.q_proj = nn.Linear(width, config.key_width, bias=False)
        self.k_proj = nn.Linear(width, config.key_width, bias=False)
        self.v_proj = nn.Linear(width, config.value_width, bias=False)
        self.g_proj = nn.Linear(width, config.value_width, bias=False)
        self.a_proj = nn.Linear(width, heads, bias=False)
        self.b_proj = nn.Linear(width, heads, bias=False)
        self.o_proj = nn.Linear(config.value_width, width, bias=False)
        self.q_conv1d = ShortConvolution(config.key_width)
        self.k_conv1d = ShortConvolution(config.key_width)
        self.v_conv1d = ShortConvolution(config.value_width)
        step = torch.exp(torch.linspace(-9.0, -6.0, heads))
        self.dt_bias = nn.Parameter(step.expm1().log())
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.o_norm = Norm(config.linear_value_head_dim)

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        heads = config.linear_num_value_heads
        projections = (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.a_proj, self.b_proj)
        mixed = F.linear(x, torch.cat([projection.weight for projection in projections]))
        keys, values = config.key_width, config.value_width
        qkv, gate, a, b = mixed.split((2 * keys + values, values, heads, heads), dim=-1)
        taps = torch.cat((self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight))
        qk, v = convolve(qkv, taps).unflatten(-1, (-1, values // heads)).split((2 * heads, heads), dim=2)
        q, k = Normed.apply(qk.transpose(1, 2)).chunk(2, dim=1)
        width = config.linear_key_head_dim
        log_decay = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        beta = b.float().sigmoid()
        with torch.autocast("cpu", enabled=False):
            out = gated_delta(
                q / width, k / width**0.5, v.transpose(1, 2), log_decay.transpose(1, 2), beta.transpose(1, 2)
            )
        gated = self.o_norm(out.to(x.dtype).transpose(1, 2)) * F.silu(gate).unflatten(-1, (heads, -1))
        return self.o_proj(gated.flatten(2))


class FirstAttention(nn.Module):
    """Attention in which q and k get one RMS norm over all heads together."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        width = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = Norm(width)
        self.k_norm = Norm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.config.num_attention_heads
        q = rotate(self.q_norm(self.q_proj(x)).unflatten(-1, (heads, -1)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x)).unflatten(-1, (heads, -1)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).unflatten(-1, (heads, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class AttentionBlock(nn.Module):
    """Attention and MLP, each followed by its norm, as in Olmo."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.self_attn = FirstAttention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.post_attention_layernorm = Norm(config.hidden_size)
        self.post_feedforward_layernorm = Norm(config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, cos, sin))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class DeltaBlock(nn.Module):
    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.linear_attn = GatedDelta(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = Norm(config.hidden_size)
        self.post_attention_layernorm = Norm(config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class HybridTrunk(nn.Module):
    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        blocks: list[nn.Module] = [AttentionBlock(config)]
        blocks += [DeltaBlock(config) for _ in range(config.num_hidden_layers - 1)]
        self.layers = nn.ModuleList(blocks)
        self.norm = Norm(config.hidden_size)


class Hybrid(nn.Module):
    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.model = HybridTrunk(config)
        half = config.head_dim // 2
        inverse = config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32), inverse)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.03 if "embed" in name else parameter.shape[1] ** -0.5)
            if name.endswith("down_proj.weight") and "layers.0" not in name:
                nn.init.zeros_(parameter)
        first = self.model.layers[0]
        for norm in (first.post_attention_layernorm, first.post_feedforward_layernorm):
            norm.weight.fill_(0.01)

    def forward(self, ids: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Return logits [B, T, vocab_size] of token ids [B, T]; T is a multiple of CHUNK.

        chosen   indices of n of the B * T positions; the result is then [n, vocab_size]
        """
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.bfloat16)
        attention, *deltas = self.model.layers
        x = attention(x, cos, sin)
        for layer in deltas:
            x = layer(x)
        if chosen is not None:
            x = x.flatten(0, 1)[chosen]
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)
