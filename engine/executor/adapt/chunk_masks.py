"""Attention of llama4 through pages, without its own chunk masks.

mlx-lm's ``LlamaModel`` trims its caches and masks the rest outside the chunk. Paged attention handles chunks
itself (``LayerSpec.chunked``), so the same layers run without masks. Other caches go to mlx-lm's own code.
The load-time probe compares the two, as for every model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .cache_adapter import LayerCache
from .overrides import override

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
