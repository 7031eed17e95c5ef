"""Attention of gemma2 and gear through pages: their model code caps logits without mlx-lm's function.

They multiply queries and keys in Python, because MLX's attention has no softcap. Octavo's kernels have one.
For a layer with a paged cache, the same projections and rotations are followed by one call of ``attend``.
Other caches go to mlx-lm's own code. The load-time probe compares the two, as for every model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .cache_adapter import HookError, LayerCache, PagedKV
from .overrides import override

GEMMA2 = "mlx_lm.models.gemma2"
GEAR = "mlx_lm.models.gear"


def install_softcap() -> None:
    override(GEMMA2, "Attention.__call__", _gemma2)
    override(GEAR, "_softcap_attention", _gear)


def _gemma2(plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(layer: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if isinstance(cache, LayerCache):
            return _attend_paged(layer, x, mask, cache)
        return plain(layer, x, mask, cache)

    return attention


def _gear(plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replace gear's attention, which is a function of queries, keys and values."""

    def attention(
        queries: mx.array, keys: Any, values: Any, scale: float, softcap: float, mask: mx.array | str | None
    ) -> mx.array:
        if not isinstance(keys, PagedKV):
            return plain(queries, keys, values, scale, softcap, mask)
        if mask is not None and not isinstance(mask, str):  # "causal" does not affect a single query
            raise HookError("the model gives attention a mask of its own")
        return keys.shim.attend(queries.squeeze(2), scale=scale, softcap=softcap)[:, :, None]

    return attention


def _attend_paged(layer: Any, x: mx.array, mask: mx.array | None, cache: LayerCache) -> mx.array:
    """Return the attention output for rows [T, 1, hidden] of a step."""
    if mask is not None:
        raise HookError("the model gives attention a mask of its own")
    queries, keys, values = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    queries = layer.rope(_heads(queries, layer.n_heads), offset=cache.offset)
    keys = layer.rope(_heads(keys, layer.n_kv_heads), offset=cache.offset)
    cache.update_and_fetch(keys, _heads(values, layer.n_kv_heads))
    out = cache.attend(queries.squeeze(2), scale=layer.scale, softcap=layer.attn_logit_softcapping)
    projected: mx.array = layer.o_proj(out.reshape(*x.shape[:2], -1))
    return projected


def _heads(x: mx.array, count: int) -> mx.array:
    """Return rows [T, 1, count * D] as [T, count, 1, D]."""
    return x.reshape(*x.shape[:2], count, -1).transpose(0, 2, 1, 3)
