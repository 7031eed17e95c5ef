"""Sparse latent attention through pages: deepseek_v32 and models derived from it.

A row attends to the ``index_topk`` positions with the best index scores.

Among equal scores the earliest position is selected, so that a row depends only on its sequence.
mlx-lm may select another position, so results may differ for sequences longer than ``index_topk``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..overrides import override
from .cache_adapter import HookError, LayerCache

DEEPSEEK_V32 = "mlx_lm.models.deepseek_v32"


def install_sparse_latents() -> None:
    override(DEEPSEEK_V32, "DeepseekV32Attention.__call__", _sparse)


def _sparse(plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(layer: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if cache is not None and isinstance(cache[0], LayerCache):
            return _attend_paged(layer, x, mask, cache[0], cache[1])
        return plain(layer, x, mask, cache)

    return attention


def _attend_paged(
    layer: Any, x: mx.array, mask: mx.array | None, latents: LayerCache, index: LayerCache
) -> mx.array:
    if mask is not None:
        raise HookError("the model gives attention a mask of its own")
    tokens = x.shape[0]
    low_rank = layer.q_a_layernorm(layer.q_a_proj(x))
    queries = layer.q_b_proj(low_rank).reshape(tokens, layer.num_heads, 1, layer.q_head_dim)
    queries, rotary = mx.split(queries, [layer.qk_nope_head_dim], axis=-1)
    latent, key = mx.split(layer.kv_a_proj_with_mqa(x), [layer.kv_lora_rank], axis=-1)
    rotary, key = layer.rope(rotary, latents.offset), layer.rope(key[:, None], latents.offset)
    latents.update_and_fetch(layer.kv_a_layernorm(latent)[:, None], key)
    seen = _choose(layer.indexer, x, low_rank, index)
    queries = layer.embed_q(queries).squeeze(2)
    rotary = (rotary * layer.scale).squeeze(2).astype(queries.dtype)
    out = latents.attend(queries, scale=layer.scale, rotary=rotary, mask=seen)
    projected: mx.array = layer.o_proj(layer.unembed_out(out[:, :, None]).reshape(tokens, 1, -1))
    return projected


def _choose(indexer: Any, x: mx.array, low_rank: mx.array, cache: LayerCache) -> mx.array | None:
    """Return the positions that each row attends to, bool [T, L]; None for all."""
    tokens, heads, dim = x.shape[0], indexer.n_heads, indexer.head_dim
    queries = indexer.wq_b(low_rank).reshape(tokens, heads, 1, dim)
    keys = indexer.k_norm(indexer.wk(x)).reshape(tokens, 1, 1, dim)
    queries = indexer.rope(queries, offset=cache.offset)
    cache.write_halves(indexer.rope(keys, offset=cache.offset))
    if cache.context.num_visible <= indexer.index_topk:
        return None
    stored = cache.gather_halves().squeeze(1).astype(mx.float32)  # [T, L, dim]
    products = mx.maximum(queries.squeeze(2).astype(mx.float32) @ stored.swapaxes(-1, -2), 0)
    weights = indexer.weights_proj(x).astype(mx.float32) * (heads**-0.5 * indexer.softmax_scale)
    scores = (products * weights.reshape(tokens, heads, 1)).sum(axis=1)
    return best_positions(scores, cache.context.positions, indexer.index_topk)


def best_positions(scores: mx.array, positions: mx.array, count: int) -> mx.array:
    """Return a mask, bool [T, L], of each row's ``count`` largest ``scores`` [T, L]."""
    seen = mx.arange(scores.shape[-1]) <= positions[:, None]
    scores = mx.where(seen, scores, -mx.inf)
    least = mx.sort(scores, axis=-1)[:, -count, None]
    above, equal = scores > least, mx.logical_and(scores == least, seen)
    wanted = count - above.sum(axis=-1, keepdims=True)
    first = mx.cumsum(equal.astype(mx.int32), axis=-1) <= wanted
    return mx.logical_or(above, mx.logical_and(equal, first))
