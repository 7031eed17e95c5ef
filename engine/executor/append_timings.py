"""Timing how the next token's K/V is kept: in pages, by concatenation, and in mlx-lm's own cache.

Each way stores one token after another of one sequence, in every layer of a small model, and evaluates
after each token as a model's step does. What is timed is storing alone: no layer attends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from octavo.kernels import page_format
from octavo.kernels.interface import AttentionBackend, LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata

KV_HEADS = 8
HEAD_DIM = 128
LAYERS = 4  # what a step prepares once is shared by them, as in a model
REPEATS = 3
DENSE_ROW_BYTES = 2 * KV_HEADS * HEAD_DIM * mx.bfloat16.size  # K and V of one token in one layer

Append = Callable[[int], None]
"""Store the token at this position, and wait until it is stored."""


@dataclass(frozen=True, slots=True)
class AppendTiming:
    """Per token and layer, for tokens stored after ``context`` others.

    seconds     mean of the best of several runs over consecutive tokens
    worst       the longest single token of that run: where a cache grows, its growth
    num_bytes   mean of bytes written, copies of what was there before included
    """

    context: int
    seconds: float
    worst: float
    num_bytes: float


class GrowingCache:
    """One layer's K and V [1, Hkv, L, D] as two dense arrays, made anew for each token."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self.keys, self.values = keys, values

    def append(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        self.keys = mx.concatenate([self.keys, keys], axis=2)
        self.values = mx.concatenate([self.values, values], axis=2)
        return [self.keys, self.values]


def use_cpu_without_metal() -> None:
    """Make the CPU MLX's device where there is no other."""
    if not mx.metal.is_available():
        mx.set_default_device(mx.cpu)


def dense_bytes(context: int) -> int:
    """Memory that concatenation needs at its peak: the caches of all layers, old and new."""
    return 2 * LAYERS * context * DENSE_ROW_BYTES


def time_pages(
    backend: AttentionBackend, name: str, *, context: int, tokens: int, page_size: int
) -> AppendTiming:
    """Into pages of the format ``name``; ValueError where the backend cannot hold it."""
    pages = -(-(context + tokens) // page_size)
    layer = LayerSpec(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, value_dim=HEAD_DIM)
    pool = backend.create_pool(
        PoolSpec(layers=(layer,) * LAYERS, num_pages=pages, page_size=page_size, k_format=name, v_format=name)
    )
    table = np.random.default_rng(0).permutation(pages).astype(np.int32)[None]
    steps = [
        AttentionMetadata.of([(at, at + 1)], table[:, : at // page_size + 1], page_size=page_size)
        for at in range(context, context + tokens)
    ]
    row = _new_row().reshape(1, KV_HEADS, HEAD_DIM)  # [T, Hkv, D] with T = 1

    def append(position: int) -> None:
        pool.begin_step(steps[position - context])
        for index in range(LAYERS):
            pool.write(index, row, row)
        mx.eval(*pool.pending())

    seconds, worst = _best_run(lambda: append, context=context, tokens=tokens)
    row_bytes = 2 * KV_HEADS * page_format(name).row_bytes(HEAD_DIM)
    return AppendTiming(context, seconds, worst, row_bytes)


def time_concatenation(*, context: int, tokens: int) -> AppendTiming:
    """Onto dense bf16 arrays, each token a new array of everything."""
    row = _new_row()
    written = 0

    def start() -> Append:
        caches = [GrowingCache(_zeros(context), _zeros(context)) for _ in range(LAYERS)]
        mx.eval([[cache.keys, cache.values] for cache in caches])

        def append(_: int) -> None:
            nonlocal written
            grown = [array for cache in caches for array in cache.append(row, row)]
            mx.eval(grown)
            written += sum(array.nbytes for array in grown)

        return append

    seconds, worst = _best_run(start, context=context, tokens=tokens)
    return AppendTiming(context, seconds, worst, written / (REPEATS * tokens * LAYERS))


def time_mlx_lm(*, context: int, tokens: int) -> AppendTiming:
    """Into mlx-lm's ``KVCache``: it writes into spare room, and copies everything for more of it."""
    from mlx_lm.models.cache import KVCache

    row = _new_row()
    written = 0

    def store(cache: Any, rows: mx.array) -> Any:
        return cache.update_and_fetch(rows, rows)

    def start() -> Append:
        make: Any = KVCache  # not annotated
        caches = [make() for _ in range(LAYERS)]
        for cache in caches:
            mx.eval(store(cache, _zeros(context)))

        def append(_: int) -> None:
            nonlocal written
            room = caches[0].keys.nbytes
            mx.eval([store(cache, row) for cache in caches])
            grew = caches[0].keys.nbytes != room
            written += sum(cache.nbytes for cache in caches) if grew else LAYERS * DENSE_ROW_BYTES

        return append

    seconds, worst = _best_run(start, context=context, tokens=tokens)
    return AppendTiming(context, seconds, worst, written / (REPEATS * tokens * LAYERS))


def _best_run(start: Callable[[], Append], *, context: int, tokens: int) -> tuple[float, float]:
    """Mean and longest seconds per token and layer of the fastest of ``REPEATS`` runs."""
    best: list[float] = []
    for _ in range(REPEATS):
        append = start()
        times = []
        for position in range(context, context + tokens):
            began = time.perf_counter()
            append(position)
            times.append(time.perf_counter() - began)
        best = times if not best or sum(times) < sum(best) else best
    return sum(best) / tokens / LAYERS, max(best) / LAYERS


def _new_row() -> mx.array:
    """K or V of one token, [1, Hkv, 1, D] in bf16, as a model's layer makes it."""
    row = mx.random.normal((1, KV_HEADS, 1, HEAD_DIM)).astype(mx.bfloat16)
    mx.eval(row)
    return row


def _zeros(count: int) -> mx.array:
    return mx.zeros((1, KV_HEADS, count, HEAD_DIM), mx.bfloat16)
