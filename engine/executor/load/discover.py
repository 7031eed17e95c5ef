"""What a model caches: one LayerSpec per attention cache, read off the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from octavo.kernels.interface import LayerSpec

from ...api.errors import ModelLoadError
from .mask_windows import observe_windows
from .mlx_lm_import import cache as caches_of_mlx_lm


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """layers      the attention layers in order of their pool index
    pool_index  per entry of the model's cache list: its index in ``layers``, or None for an
                entry the model never writes
    dtype       what the model computes K in
    vocab_size  width of the logits
    """

    layers: tuple[LayerSpec, ...]
    pool_index: tuple[int | None, ...]
    dtype: mx.Dtype
    vocab_size: int


def discover_layout(model: Module, architecture: str) -> CacheLayout:
    """Shapes of every cache, from a forward of two tokens that is built but never evaluated.

    Raises ModelLoadError for caches that are not plain or sliding-window attention.
    """
    caches = caches_of_mlx_lm.make_prompt_cache(model)
    for cache in caches:
        if type(cache) not in (caches_of_mlx_lm.KVCache, caches_of_mlx_lm.RotatingKVCache):
            raise ModelLoadError(
                f"model type {architecture!r} keeps its state in {type(cache).__name__}, which pages cannot "
                "hold; models with full or sliding-window attention can be served"
            )
    try:
        with observe_windows(caches) as windows:
            logits = model(mx.array([[0, 1]]), cache=caches)
    except Exception as error:  # model code of any architecture
        raise ModelLoadError(f"model type {architecture!r} fails on a plain forward: {error}") from error
    layers: list[LayerSpec] = []
    pool_index: list[int | None] = []
    for index, cache in enumerate(caches):
        pool_index.append(None if cache.keys is None else len(layers))
        if cache.keys is not None:
            layers.append(_spec(cache, windows.by_cache.get(index)))
    if not layers:
        raise ModelLoadError(f"model type {architecture!r} wrote nothing to its cache")
    dtype = next(cache.keys.dtype for cache in caches if cache.keys is not None)
    return CacheLayout(
        layers=tuple(layers), pool_index=tuple(pool_index), dtype=dtype, vocab_size=logits.shape[-1]
    )


def _spec(cache: Any, mask_window: int | None) -> LayerSpec:
    """A window that the model masks by itself goes before the one its cache keeps."""
    rotating = isinstance(cache, caches_of_mlx_lm.RotatingKVCache)
    return LayerSpec(
        num_kv_heads=cache.keys.shape[1],
        head_dim=cache.keys.shape[-1],
        value_dim=cache.values.shape[-1],
        window=mask_window or (cache.max_size if rotating else None),
        keep=cache.keep if rotating else 0,
    )
