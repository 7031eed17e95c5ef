"""Check of each attention layer against float64, on random K and V."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from octavo.kernels.interface import LayerSpec
from octavo.kernels.verify.oracle import dense_attention

from ..adapt.cache_adapter import LayerCache, StepContext, attention
from ..cache_layout import CacheLayout
from ..paged_model import PagedModel
from .probe_steps import Work, step_metadata

MAX_ERROR = 2e-3  # relative error of a row


def find_mistake(paged: PagedModel, layout: CacheLayout, lengths: list[int]) -> str | None:
    seen: set[tuple[LayerSpec, bool]] = set()
    for index, spec in enumerate(layout.layers):
        latents = index in paged.context.latent_layers
        if (spec, latents) in seen:
            continue
        seen.add((spec, latents))
        shim = LayerCache(StepContext(paged.kv_cache), index, spec)
        error = _check_layer(shim, lengths, bf16=layout.dtype == mx.bfloat16, latents=latents)
        if not error <= MAX_ERROR:
            if latents:
                return f"attention over latents (cache {index}) has error {error:.2g} on random latents"
            kind = "chunks" if spec.chunked else "a window"
            window = "all positions" if spec.window is None else f"{kind} of {spec.window}"
            return f"attention over {window} (cache {index}) has error {error:.2g} on random keys and values"
    return None


def _check_layer(shim: LayerCache, lengths: list[int], *, bf16: bool, latents: bool) -> float:
    spec, rng = shim.spec, np.random.default_rng(shim.layer)
    dtype = mx.bfloat16 if bf16 else mx.float16
    heads, num_heads = spec.num_kv_heads, 2 * spec.num_kv_heads
    scale = spec.head_dim**-0.5
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
        k, v = (
            mx.array(np.concatenate([rows[i][a:b] for i, a, b in work])[:, :, None]).astype(dtype)
            for rows in (keys, values)
        )
        shim.context.kv_cache.begin_step(metadata)
        shim.context.begin(metadata)
        asked, stored, read = queries, keys, values
        handles = shim.update_and_fetch(k, v)
        if latents:
            rotary = rng.standard_normal((*queries.shape[:2], spec.value_dim)).astype(np.float32)
            out = shim.attend(mx.array(queries), scale=scale, rotary=mx.array(rotary))
            asked = np.concatenate([queries, rotary / scale], axis=-1)
            stored, read = [np.concatenate(pair, axis=-1) for pair in zip(keys, values, strict=True)], keys
        else:
            wide = (handle.astype(mx.float32) for handle in handles)
            out = attention(mx.array(queries)[:, :, None], *wide, cache=shim, scale=scale).squeeze(2)
        out = out.astype(mx.float32)
        mx.eval(out, *shim.context.kv_cache.pending())
        starts = metadata.q_start.tolist()
        expected = np.concatenate(
            [
                dense_attention(
                    asked[q : q + b - a], stored[i][:b], read[i][:b], np.arange(a, b, dtype=np.int32),
                    scale=scale, window=spec.window, keep=spec.keep, chunked=spec.chunked,
                )
                for (i, a, b), q in zip(work, starts, strict=False)
            ]
        )  # fmt: skip
        size = np.sqrt((expected**2).mean(-1)) + 1e-12
        worst = max(worst, float((np.sqrt(((np.array(out) - expected) ** 2).mean(-1)) / size).max()))
    return worst


def _stored(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> NDArray[Any]:
    values = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    return np.array(values.astype(mx.float32)).swapaxes(0, 1)
