"""llama4's layers through pages, without the mask that it makes of chunks.

Its ``LlamaModel`` trims its caches and masks what of them lies in another chunk. Where caches are pages,
attention knows of chunks by itself (``LayerSpec.chunked``): the same layers follow each other without masks.
Any other cache goes to mlx-lm's own code. The load-time probe compares the two, as for every model.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import mlx.core as mx

from .cache_adapter import LayerShim

LLAMA4 = "mlx_lm.models.llama4"
_MARK = "_octavo_plain"


def install_chunks() -> None:
    """Patch llama4's model, if mlx-lm's module is imported and was not patched before."""
    module = sys.modules.get(LLAMA4)
    kind: Any = None if module is None else module.LlamaModel
    if kind is None or hasattr(kind, _MARK):
        return
    plain = kind.__call__
    setattr(kind, _MARK, plain)

    @functools.wraps(plain)
    def hidden(model: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        if cache is None or not all(isinstance(one, LayerShim) and one.is_paged for one in cache):
            out: mx.array = plain(model, inputs, cache)
            return out
        x = model.embed_tokens(inputs)
        for layer, shim in zip(model.layers, cache, strict=True):
            x = layer(x, None, cache=shim)
        normed: mx.array = model.norm(x)
        return normed

    kind.__call__ = hidden
