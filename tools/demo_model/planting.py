"""Initial weights of the first two layers: an induction circuit, which training refines.

The circuit finds an earlier occurrence of the current token, and repeats the token after it. Random
weights would form it after millions of tokens. Heads of layer 0 copy the tokens at ``OFFSETS`` before the
current token. Layer 1 matches the current token with those copies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from demo_model.network import Attention, Qwen3

EMBEDDING_SCALE = 0.03
OFFSETS = (1, 2, 1, 3)
FAST = 6  # RoPE frequencies that tell offsets apart


@torch.no_grad()
def plant_induction(model: Qwen3, seed: int = 0) -> None:
    config, generator = model.config, torch.Generator().manual_seed(seed)

    def basis() -> Tensor:
        return torch.linalg.qr(torch.randn(config.hidden_size, config.head_dim, generator=generator)).Q

    model.model.embed_tokens.weight[:, 0] = 8 * EMBEDDING_SCALE
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    for attention in (first, second):
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            _small_noise(linear.weight, generator)
        attention.q_norm.weight.fill_(1.5)
        attention.k_norm.weight.fill_(1.5)
    read = [basis() for _ in range(config.num_key_value_heads)]
    write = [basis() for _ in range(config.num_attention_heads)]
    _plant_offsets(first, read, write)
    _plant_matching(second, read, write, basis)


def _small_noise(parameter: nn.Parameter, generator: torch.Generator) -> None:
    parameter.normal_(std=0.15 * parameter.shape[1] ** -0.5, generator=generator)
    parameter[:, 0] = 0.0


def _plant_offsets(attention: Attention, read: list[Tensor], write: list[Tensor]) -> None:
    config = attention.config
    dim, half = config.head_dim, config.head_dim // 2
    fast = torch.arange(FAST)
    speed = config.rope_theta ** (-fast / half)
    for head, copied in enumerate(read):
        attention.k_proj.weight[head * dim + fast, 0] = 0.6
        attention.v_proj.weight[head * dim : (head + 1) * dim] = copied.T
    for head, offset in enumerate(OFFSETS):
        # A score is a sum of cos(speed * (distance - offset)), so it peaks at distance == offset.
        attention.q_proj.weight[head * dim + fast, 0] = 0.6 * torch.cos(speed * offset)
        attention.q_proj.weight[head * dim + half + fast, 0] = -0.6 * torch.sin(speed * offset)
        attention.o_proj.weight[:, head * dim : (head + 1) * dim] = EMBEDDING_SCALE * write[head]


def _plant_matching(
    attention: Attention, read: list[Tensor], write: list[Tensor], basis: Callable[[], Tensor]
) -> None:
    config = attention.config
    dim, half, groups = config.head_dim, config.head_dim // 2, config.group_size
    slow = torch.cat((torch.arange(half // 2, half), torch.arange(half + half // 2, dim)))
    for head in range(config.num_key_value_heads):
        attention.k_proj.weight[head * dim + slow] += write[head * groups].T[: len(slow)]
        copied = basis()
        attention.v_proj.weight[head * dim : (head + 1) * dim] = copied.T
        for query in range(head * groups, (head + 1) * groups):
            attention.q_proj.weight[query * dim + slow] += read[head].T[: len(slow)]
            columns = slice(query * dim, (query + 1) * dim)
            attention.o_proj.weight[:, columns] = 2 * EMBEDDING_SCALE * copied
