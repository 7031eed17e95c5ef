"""Paged KV caches for mlx-lm's model code, which stays unchanged.

Every token of a mixed batch is a separate row, so the model's input is [T, 1]. A ``LayerCache`` returns a
position per row, writes K and V into pages, and returns ``PagedKV`` handles instead of dense arrays.
The patched ``scaled_dot_product_attention`` sends handles to the paged kernels.

A layer of latent attention (MLA) caches a latent [T, 1, 1, R] as K and a rotary key [T, 1, 1, P] as V:

    scores = (q_pe * scale) @ k_pe.swapaxes(-1, -2)
    scaled_dot_product_attention(q, latent, latent, scale=scale, mask=scores)

The scores are never stored, because the kernels read latents and rotary keys from pages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from octavo.kernels.interface import AttendOptions, LayerSpec, PagedKVCache
from octavo.kernels.metadata import AttentionMetadata

from ..mlx_lm_import import base
from ..overrides import rebind


@dataclass(frozen=True, slots=True)
class RotaryScores:
    """Lazy product of scaled rotary queries [T, Hq, 1, P] and a layer's rotary keys."""

    shim: LayerCache
    queries: mx.array


class RotaryKeys(mx.array):
    def __init__(self, shim: LayerCache) -> None:
        super().__init__(0.0)
        self._shim = shim

    def __rmatmul__(self, queries: mx.array) -> RotaryScores:  # type: ignore[misc]
        return RotaryScores(self._shim, queries)


_plain_attention: Callable[..., mx.array] = base.scaled_dot_product_attention

observers: list[Callable[[Any, Any], None]] = []


class HookError(RuntimeError):
    """The model needs an operation of its cache that pages do not support."""


class StepContext:
    def __init__(self, kv_cache: PagedKVCache) -> None:
        self.kv_cache = kv_cache
        self.positions = mx.array([0])  # int32 [T]
        self.latent_layers: set[int] = set()
        self.gathers = False
        self.traced = False
        self._step: AttentionMetadata | None = None

    def begin(self, step: AttentionMetadata) -> None:
        self._step = step

    @property
    def step(self) -> AttentionMetadata:
        assert self._step is not None, "a cache object was used outside a step"
        return self._step

    @property
    def num_visible(self) -> int:
        if self.traced:
            raise HookError("the model reads the length of its context as a number")
        return int(self.step.kv_len.max())


class PagedKV:
    """K or V of one layer in pages, in place of the dense [T, Hkv, L, D] that mlx-lm expects.

    Arithmetic on it raises TypeError.
    """

    def __init__(self, shim: LayerCache, *, dtype: mx.Dtype, is_value: bool, tiles: int = 1) -> None:
        self.shim = shim
        self.dtype = dtype
        self.is_value = is_value
        self.tiles = tiles

    @property
    def shape(self) -> tuple[int, int, mx.array, int]:
        context = self.shim.context
        heads = self.shim.spec.num_kv_heads * self.tiles
        dim = self.shim.spec.value_dim if self.is_value else self.shim.spec.head_dim
        return context.step.num_tokens, heads, context.positions + 1, dim

    def astype(self, dtype: mx.Dtype) -> PagedKV:
        return PagedKV(self.shim, dtype=dtype, is_value=self.is_value, tiles=self.tiles)

    def tiled(self, count: int) -> PagedKV:
        return PagedKV(self.shim, dtype=self.dtype, is_value=self.is_value, tiles=self.tiles * count)

    def swapaxes(self, first: int, second: int) -> RotaryKeys:
        if not self.is_value or {first % 4, second % 4} != {2, 3}:
            raise HookError("the model transposes keys or values by itself")
        return RotaryKeys(self.shim)


class LayerCache:
    """Paged replacement of a cache that ``make_prompt_cache`` returns."""

    def __init__(self, context: StepContext, layer: int, spec: LayerSpec) -> None:
        self.context = context
        self.layer = layer
        self.spec = spec
        self._dtypes = (mx.float32, mx.float32)
        self._options = AttendOptions(scale=1.0)

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        softcap: float | None = None,
        rotary: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> mx.array:
        """Return attention of queries [T, Hq, D] over the layer's pages."""
        if rotary is not None or mask is not None:
            if rotary is not None:
                self.context.latent_layers.add(self.layer)
            options = AttendOptions(scale=scale, rotary=rotary, mask=mask)
            return self.context.kv_cache.attend(self.layer, queries, options)
        options = self._options
        if options.scale != scale or options.sinks is not sinks or options.softcap != softcap:
            self._options = options = AttendOptions(scale=scale, sinks=sinks, softcap=softcap)
        return self.context.kv_cache.attend(self.layer, queries, options)

    @property
    def offset(self) -> mx.array:
        """Position of each row, int32 [T]."""
        return copy.copy(self.context.positions)

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> None:
        del return_array
        if num_tokens != 1:
            raise HookError(f"the model needs a mask for {num_tokens} tokens per row instead of 1")
        if window_size is not None and window_size != self.spec.window:
            raise HookError(
                f"the model masks a window of {window_size} where its cache says {self.spec.window}"
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write K [T, Hkv, 1, D] and V of the step's rows."""
        if keys.ndim != 4 or keys.shape[2] != 1 or keys.shape[0] != self.context.step.num_tokens:
            raise HookError(f"the model caches keys of shape {keys.shape}, which is not one position per row")
        self.context.kv_cache.write(self.layer, keys.squeeze(2), values.squeeze(2))
        self._dtypes = (keys.dtype, values.dtype)
        return self.keys_and_values()

    def write_halves(self, keys: mx.array) -> None:
        """Write keys [T, Hkv, 1, 2 * D]: the first half of each key is stored as K, the second half as V."""
        self.context.gathers = True
        rows = keys.squeeze(2)
        self.context.kv_cache.write(
            self.layer, rows[..., : self.spec.head_dim], rows[..., self.spec.head_dim :]
        )

    def gather_halves(self) -> mx.array:
        """Return keys [T, Hkv, L, 2 * D] written by ``write_halves``."""
        return mx.concatenate([*self.context.kv_cache.gather(self.layer)], axis=-1)

    def keys_and_values(self) -> tuple[Any, Any]:
        return (
            PagedKV(self, dtype=self._dtypes[0], is_value=False),
            PagedKV(self, dtype=self._dtypes[1], is_value=True),
        )


def attention(queries: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> mx.array:
    if isinstance(keys, PagedKV):
        return _paged_attention(queries, keys, values, *args, **kwargs)
    for observe in observers:
        observe(keys, kwargs.get("mask"))
    return _plain_attention(queries, keys, values, *args, **kwargs)


def _paged_attention(
    queries: mx.array,
    keys: PagedKV,
    values: PagedKV,
    cache: object = None,
    scale: float = 1.0,
    mask: object = None,
    sinks: mx.array | None = None,
) -> mx.array:
    del cache
    if isinstance(mask, RotaryScores):
        return _latent_attention(queries, keys, values, scale=scale, scores=mask, sinks=sinks)
    if mask is not None and not isinstance(mask, str):  # "causal" does not affect a single query
        raise HookError("the model gives attention a mask of its own")
    if not isinstance(values, PagedKV) or values.shim is not keys.shim:
        raise HookError("the model attends over K and V of different caches")
    if keys.is_value or not values.is_value:
        raise HookError("the model uses K as V, or V as K")
    if keys.tiles != values.tiles or (keys.tiles > 1 and sinks is not None):
        raise HookError("the model repeats the heads of K and of V in different ways")
    rows = queries.squeeze(2)
    if keys.tiles > 1:
        return _tiled_attention(rows, keys, scale=scale)[:, :, None, :]
    return keys.shim.attend(rows, scale=scale, sinks=sinks)[:, :, None, :]


def _tiled_attention(queries: mx.array, keys: PagedKV, *, scale: float) -> mx.array:
    tokens, num_heads, dim = queries.shape
    tiles, heads = keys.tiles, keys.shim.spec.num_kv_heads
    by_head = queries.reshape(tokens, tiles, heads, -1, dim).swapaxes(1, 2).reshape(tokens, num_heads, dim)
    out = keys.shim.attend(by_head, scale=scale)
    out = out.reshape(tokens, heads, tiles, -1, out.shape[-1]).swapaxes(1, 2)
    return out.reshape(tokens, num_heads, -1)


def _latent_attention(
    queries: mx.array,
    keys: PagedKV,
    values: PagedKV,
    *,
    scale: float,
    scores: RotaryScores,
    sinks: mx.array | None,
) -> mx.array:
    halves = {(handle.shim, handle.is_value) for handle in (keys, values)}
    if halves != {(scores.shim, False)} or sinks is not None:
        raise HookError("the model attends over latents and rotary keys of different caches")
    rotary = scores.queries.squeeze(2).astype(queries.dtype)
    return keys.shim.attend(queries.squeeze(2), scale=scale, rotary=rotary)[:, :, None, :]


def install_hook() -> None:
    """Patch mlx-lm's attention function. Call it again after loading a model."""
    rebind("scaled_dot_product_attention", _plain_attention, attention)
