"""Check of each attention layer against float64, on random K and V."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from octavo.kernels.interface import LayerSpec
from octavo.kernels.metadata import AttentionMetadata

from ..adapt import cache_adapter
from ..cache_layout import CacheLayout
from ..paged_model import PagedModel
from .probe_steps import Work, step_metadata

MAX_ERROR = 2e-3  # relative error of a row

Doubles = NDArray[np.float64]


def find_mistake(paged: PagedModel, layout: CacheLayout, lengths: list[int]) -> str | None:
    seen: set[tuple[LayerSpec, bool]] = set()
    for index, spec in enumerate(layout.layers):
        latents = index in paged.latent_layers
        if (spec, latents) in seen:
            continue
        seen.add((spec, latents))
        error = _check_layer(paged, index, spec, lengths, bf16=layout.dtype == mx.bfloat16, latents=latents)
        if not error <= MAX_ERROR:
            if latents:
                return f"attention over latents (cache {index}) has error {error:.2g} on random latents"
            kind = "chunks" if spec.chunked else "a window"
            window = "all positions" if spec.window is None else f"{kind} of {spec.window}"
            return f"attention over {window} (cache {index}) has error {error:.2g} on random keys and values"
    return None


def _check_layer(
    paged: PagedModel, index: int, spec: LayerSpec, lengths: list[int], *, bf16: bool, latents: bool
) -> float:
    rng = np.random.default_rng(index)
    dtype = mx.bfloat16 if bf16 else mx.float16
    heads, num_heads = spec.num_kv_heads, 2 * spec.num_kv_heads
    keys = [_stored(rng, (heads, length, spec.head_dim), dtype) for length in lengths]
    values = [_stored(rng, (heads, length, spec.value_dim), dtype) for length in lengths]
    worst = 0.0
    for first in (True, False):
        work: list[Work] = [
            (i, 0 if first else length - 1, length - 1 if first else length)
            for i, length in enumerate(lengths)
        ]
        metadata = step_metadata(work, num_sequences=len(lengths), longest=max(lengths))
        queries = rng.standard_normal((metadata.num_tokens, num_heads, spec.head_dim)).astype(np.float32)
        k, v = (_rows([rows[i][:, a:b] for i, a, b in work]).astype(dtype) for rows in (keys, values))
        if latents:
            rotary = rng.standard_normal((*queries.shape[:2], spec.value_dim)).astype(np.float32)
            got = _attend_latents(paged, index, metadata, queries, rotary, k, v)
            asked = np.concatenate([queries, rotary * spec.head_dim**0.5], axis=-1)
            stored = [np.concatenate(pair, axis=-1) for pair in zip(keys, values, strict=True)]
            read = keys
        else:
            got = _attend(paged, index, metadata, queries, k, v)
            asked, stored, read = queries, keys, values
        expected = np.concatenate(
            [
                _attention(asked[q : q + b - a], stored[i], read[i], a, spec)
                for (i, a, b), q in zip(work, metadata.q_start.tolist(), strict=False)
            ]
        )
        scale = np.sqrt((expected**2).mean(-1)) + 1e-12
        worst = max(worst, float((np.sqrt(((got - expected) ** 2).mean(-1)) / scale).max()))
    return worst


def _stored(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> Doubles:
    values = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    return np.array(values.astype(mx.float32)).astype(np.float64)


def _rows(parts: list[Doubles]) -> mx.array:
    rows = np.concatenate([part.swapaxes(0, 1) for part in parts])[:, :, None]
    return mx.array(rows.astype(np.float32))


def _attend(
    paged: PagedModel,
    index: int,
    metadata: AttentionMetadata,
    queries: NDArray[np.float32],
    keys: mx.array,
    values: mx.array,
) -> Doubles:
    paged.kv_cache.begin_step(metadata)
    shim = paged.begin_layer(index, metadata)
    k, v = shim.update_and_fetch(keys, values)
    scale = float(queries.shape[-1] ** -0.5)
    out = cache_adapter.attention(
        mx.array(queries)[:, :, None], k.astype(mx.float32), v.astype(mx.float32), cache=shim, scale=scale
    )
    out = out.squeeze(2).astype(mx.float32)
    mx.eval(out, *paged.kv_cache.pending())
    return np.array(out).astype(np.float64)


def _attend_latents(
    paged: PagedModel,
    index: int,
    metadata: AttentionMetadata,
    queries: NDArray[np.float32],
    rotary: NDArray[np.float32],
    latents: mx.array,
    keys: mx.array,
) -> Doubles:
    paged.kv_cache.begin_step(metadata)
    shim = paged.begin_layer(index, metadata)
    shim.update_and_fetch(latents, keys)
    scale = float(queries.shape[-1] ** -0.5)
    out = shim.attend(mx.array(queries), scale=scale, rotary=mx.array(rotary)).astype(mx.float32)
    mx.eval(out, *paged.kv_cache.pending())
    return np.array(out).astype(np.float64)


def _attention(
    queries: NDArray[np.float32], keys: Doubles, values: Doubles, start: int, spec: LayerSpec
) -> Doubles:
    """Return float64 attention [n, Hq, Dv] of queries [n, Hq, D] over K and V [Hkv, L, D]."""
    count, num_heads, _ = queries.shape
    at, seen = start + np.arange(count)[:, None], np.arange(keys.shape[1])[None]
    visible = seen <= at
    if spec.window is not None and spec.chunked:
        visible &= seen // spec.window == at // spec.window
    elif spec.window is not None:
        visible &= (seen > at - spec.window) | (seen < spec.keep)
    group = num_heads // spec.num_kv_heads
    out = np.empty((count, num_heads, values.shape[-1]))
    for head in range(num_heads):
        k, v = keys[head // group], values[head // group]
        logits = np.where(visible, queries[:, head] @ k.T * spec.head_dim**-0.5, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out[:, head] = weights @ v / weights.sum(-1, keepdims=True)
    return out
