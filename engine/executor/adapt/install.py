"""Changes to mlx-lm's model modules that paged attention needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..overrides import override
from .block_sparse import heads_of, install_block_sparse
from .cache_adapter import HookError, LayerCache, PagedKV, attention, install_hook
from .sparse_latents import install_sparse_latents

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
    if mask is not None:
        raise HookError("the model gives attention a mask of its own")
    queries, keys, values = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    queries = layer.rope(heads_of(queries, layer.n_heads), offset=cache.offset)
    keys = layer.rope(heads_of(keys, layer.n_kv_heads), offset=cache.offset)
    cache.update_and_fetch(keys, heads_of(values, layer.n_kv_heads))
    out = cache.attend(queries.squeeze(2), scale=layer.scale, softcap=layer.attn_logit_softcapping)
    projected: mx.array = layer.o_proj(out.reshape(*x.shape[:2], -1))
    return projected


class Changed:
    def __init__(self, plain: Any, **names: Any) -> None:
        self.plain = plain
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def _tile(array: Any, reps: Sequence[int]) -> Any:
    if not isinstance(array, PagedKV):
        return mx.tile(array, reps)
    first, count, *rest = reps
    if first != 1 or rest != [1, 1]:
        raise HookError(f"the model tiles keys or values by {list(reps)}, not along their heads alone")
    return array.tiled(count)


def _arange(first: Any, *rest: Any, **options: Any) -> Any:
    import numpy as np

    return first[:, None] if isinstance(first, mx.array) else np.arange(first, *rest, **options)


def _mx_arange(first: Any, *rest: Any, **options: Any) -> Any:
    return first[:, None, None] if isinstance(first, mx.array) else mx.arange(first, *rest, **options)


def _attend(queries: mx.array, keys: Any, values: Any, **options: Any) -> mx.array:
    if isinstance(keys, PagedKV):
        return attention(queries, keys, values, **options)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, **options)


_CHANGED: dict[str, tuple[str, str, Any]] = {
    "plamo": ("mx", "tile", _tile),
    "gpt_bigcode": ("np", "arange", _arange),
    "llama4": ("mx", "arange", _mx_arange),
    "plamo2": ("mx", "fast", Changed(mx.fast, scaled_dot_product_attention=_attend)),
}
"""Replacements by model module: library name, attribute and new function."""


def install_names() -> None:
    for model, (name, attribute, replacement) in _CHANGED.items():
        module = sys.modules.get(f"mlx_lm.models.{model}")
        if module is not None and not isinstance(plain := getattr(module, name), Changed):
            setattr(module, name, Changed(plain, **{attribute: replacement}))


def adapt_models() -> None:
    """Apply all changes to mlx-lm's imported modules. Repeated calls have no effect."""
    install_hook()
    install_softcap()
    install_chunks()
    install_sparse_latents()
    install_block_sparse()
    install_names()


LLAMA4 = "mlx_lm.models.llama4"


def install_chunks() -> None:
    override(LLAMA4, "LlamaModel.__call__", _without_masks)


def _without_masks(plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def hidden(model: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        if cache is None or not all(isinstance(one, LayerCache) for one in cache):
            return plain(model, inputs, cache)
        x = model.embed_tokens(inputs)
        for layer, shim in zip(model.layers, cache, strict=True):
            x = layer(x, None, cache=shim)
        normed: mx.array = model.norm(x)
        return normed

    return hidden
