"""Initial weights with which a hybrid's delta layers look up a token by the tokens before it.

The convolutions allow this in one layer: a key holds the tokens before a token, and a value holds the token.
In half of the heads a key holds three tokens. In the other half it holds a mean of earlier tokens, which the
attention layer computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from demo_model.hybrid_network import TAPS, FirstAttention, GatedDelta, Hybrid

EMBEDDING_SCALE = 0.03
GAINS = (0.05, 0.02, 0.02)
SHARPNESS = (1.0, 1.4, 1.7, 2.0)


@torch.no_grad()
def plant_lookups(model: Hybrid, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    embedding = model.model.embed_tokens.weight
    embedding.normal_(std=EMBEDDING_SCALE, generator=generator)
    embedding[:, 0] = 8 * EMBEDDING_SCALE
    first = model.model.layers[0]
    _plant_recency(first.self_attn, generator)
    first.post_attention_layernorm.weight.fill_(EMBEDDING_SCALE)
    first.post_feedforward_layernorm.weight.fill_(EMBEDDING_SCALE / 10)
    for block, gain in zip(model.model.layers[1:], GAINS, strict=True):
        _plant(block.linear_attn, gain, generator)


def _plant_recency(layer: FirstAttention, generator: torch.Generator) -> None:
    width, dim = layer.q_proj.weight.shape[1], layer.config.head_dim
    for projection in (layer.q_proj, layer.k_proj):
        projection.weight.normal_(std=0.2, generator=generator)
        projection.weight[:, 0] = 1.0
    for head, sharpness in enumerate(SHARPNESS):
        for norm in (layer.q_norm, layer.k_norm):
            norm.weight[head * dim : (head + 1) * dim] = sharpness
    layer.v_proj.weight.copy_(torch.linalg.qr(torch.randn(width, width, generator=generator)).Q)
    layer.v_proj.weight[:, 0] = 0.0
    layer.o_proj.weight.copy_(torch.linalg.qr(torch.randn(width, width, generator=generator)).Q)


def _plant(layer: GatedDelta, gain: float, generator: torch.Generator) -> None:
    config = layer.config
    width, keys, values = config.hidden_size, config.linear_key_head_dim, config.linear_value_head_dim

    def rows(count: int) -> Tensor:
        basis = torch.linalg.qr(torch.randn(width, count, generator=generator)).Q.T.contiguous()
        basis[:, 0] = 0.0
        return basis

    for projection in (layer.a_proj, layer.b_proj, layer.g_proj):
        projection.weight.normal_(std=0.02, generator=generator)
    layer.b_proj.weight[:, 0] = 0.15
    layer.g_proj.weight[:, 0] = 0.2
    for head in range(config.linear_num_key_heads):
        lags = 1 if head % 2 else 3
        base = head * keys
        for lag in range(lags):
            part = slice(base + keys * lag // lags, base + keys * (lag + 1) // lags)
            read = 0.6 * rows(part.stop - part.start)
            layer.q_proj.weight[part] = read
            layer.k_proj.weight[part] = read
            layer.q_conv1d.weight[part, 0, TAPS - 1 - lag] += 1.0
            layer.k_conv1d.weight[part, 0, TAPS - 2 - lag] += 1.0
        own = slice(head * values, (head + 1) * values)
        copied = rows(values)
        layer.v_proj.weight[own] = 0.6 * copied
        layer.o_proj.weight[:, own] = gain * copied.T
    layer.v_conv1d.weight[:, 0, TAPS - 1] += 1.0
