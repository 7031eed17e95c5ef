"""Block-sparse attention through pages, for phi3small and minimax_m3.

Among blocks with equal scores the earliest is selected.

An error of mlx-lm is corrected: phi3small adds its boolean causal mask to the scores of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..overrides import override
from .cache_adapter import HookError, LayerCache, PagedKV
from .sparse_latents import best_positions

PHI3SMALL = "mlx_lm.models.phi3small"
MINIMAX_M3 = "mlx_lm.models.minimax_m3_vl"


def install_block_sparse() -> None:
    override(PHI3SMALL, "Attention._block_sparse_attention", _strided)
    override(MINIMAX_M3, "Attention.__call__", _chosen)


def _strided(plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(
        layer: Any, queries: mx.array, keys: Any, values: Any, scale: float, mask: mx.array | None
    ) -> mx.array:
        if not isinstance(keys, PagedKV):
            if mask is not None and mask.dtype == mx.bool_:
                mask = mx.where(mask, 0.0, -mx.inf).astype(queries.dtype)
            return plain(layer, queries, keys, values, scale, mask)
        if mask is not None:
            raise HookError("the model gives attention a mask of its own")
        context = keys.shim.context
        seen = strided_blocks(
            context.positions,
            context.num_visible,
            num_heads=layer.n_heads,
            block_size=layer.blocksparse_block_size,
            local_blocks=layer.blocksparse_num_local_blocks,
            stride=layer.blocksparse_vert_stride,
        )
        return keys.shim.attend(queries.squeeze(2), scale=scale, mask=seen)[:, :, None]

    return attention


def strided_blocks(
    positions: mx.array, length: int, *, num_heads: int, block_size: int, local_blocks: int, stride: int
) -> mx.array:
    """Return the positions that each row sees, bool [T, num_heads, length]."""
    at, heads = mx.arange(length), mx.arange(1, num_heads + 1)
    behind = (positions // block_size)[:, None] - at // block_size
    strided = (at // block_size + heads[:, None]) % stride == 0
    near = mx.logical_and(behind < local_blocks, at <= positions[:, None])
    far = mx.logical_and(behind >= local_blocks, at <= positions[:, None])
    return mx.logical_or(near[:, None], mx.logical_and(far[:, None], strided))


def _chosen(plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(layer: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not layer.is_sparse_attn or cache is None:
            return plain(layer, x, mask, cache)
        if not isinstance(cache[0], LayerCache):
            return plain(layer, x, mask, cache)
        if mask is not None:
            raise HookError("the model gives attention a mask of its own")
        return _attend_chosen(layer, x, cache[0], cache[1])

    return attention


def _attend_chosen(layer: Any, x: mx.array, shim: LayerCache, index: LayerCache) -> mx.array:
    queries = heads_of(layer.q_proj(x), layer.num_attention_heads)
    keys = heads_of(layer.k_proj(x), layer.num_key_value_heads)
    values = heads_of(layer.v_proj(x), layer.num_key_value_heads)
    if layer.use_qk_norm:
        queries, keys = layer.q_norm(queries), layer.k_norm(keys)
    queries = layer.rope(queries, offset=shim.offset)
    shim.update_and_fetch(layer.rope(keys, offset=shim.offset), values)
    seen = _choose(layer, x, index)
    out = shim.attend(queries.squeeze(2), scale=layer.scale, mask=seen)
    projected: mx.array = layer.o_proj(out.reshape(x.shape[0], 1, -1))
    return projected


def _choose(layer: Any, x: mx.array, cache: LayerCache) -> mx.array | None:
    context = cache.context
    keys = layer.index_k_norm(layer.index_k_proj(x)[:, :, None]).transpose(0, 2, 1, 3)
    cache.write_halves(layer.index_rope(keys, offset=cache.offset))
    if context.num_visible <= layer.index_topk_blocks * layer.index_block_size:
        return None
    queries = layer.index_q_norm(layer.index_q_proj(x).reshape(x.shape[0], 1, layer.index_n_heads, -1))
    queries = layer.index_rope(queries.transpose(0, 2, 1, 3), offset=cache.offset).squeeze(2)
    stored = cache.gather_halves().squeeze(1).astype(mx.float32)  # [T, L, dim]
    scores = queries.astype(mx.float32) @ stored.swapaxes(-1, -2)
    seen = best_blocks(
        scores,
        context.positions,
        block_size=layer.index_block_size,
        count=layer.index_topk_blocks,
        local_blocks=layer.index_local_blocks,
    )
    return mx.repeat(seen, layer.num_attention_heads // layer.index_n_heads, axis=1)


def best_blocks(
    scores: mx.array, positions: mx.array, *, block_size: int, count: int, local_blocks: int
) -> mx.array:
    """Return a mask of the positions in each row's ``count`` best blocks, bool [T, H, L]."""
    tokens, heads, length = scores.shape
    seen = (mx.arange(length) <= positions[:, None])[:, None]
    blocks = -(-length // block_size)
    padding = [(0, 0), (0, 0), (0, blocks * block_size - length)]
    masked = mx.pad(mx.where(seen, scores, -mx.inf), padding, constant_values=-mx.inf)
    best = masked.reshape(tokens, heads, blocks, block_size).max(axis=-1)
    own = (positions // block_size)[:, None, None]
    behind = own - mx.arange(blocks)
    local = mx.logical_and(behind >= 0, behind < local_blocks)
    best = mx.where(local, mx.inf, best).reshape(tokens * heads, blocks)
    chosen = (
        best_positions(best, mx.repeat(positions // block_size, heads), count) if blocks > count else None
    )
    if chosen is None:
        return mx.broadcast_to(seen, scores.shape)
    wide = mx.repeat(chosen.reshape(tokens, heads, blocks), block_size, axis=-1)[..., :length]
    return mx.logical_and(wide, seen)


def heads_of(x: mx.array, count: int) -> mx.array:
    return x.reshape(*x.shape[:2], count, -1).transpose(0, 2, 1, 3)
