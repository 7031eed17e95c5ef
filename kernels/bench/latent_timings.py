"""Timing attention over latents (MLA), and what it replaces: gathering them, and MLX's own attention.

Shapes are those of DeepSeek-V3 and what is made like it: latents of 512 values and rotary keys of 64, shared
by all query heads. Rotary keys have 16 bits whatever the latents have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..interface import AttendOptions, AttentionBackend, KVPool, LayerSpec, PoolSpec
from ..metadata import AttentionMetadata
from .kernel_timings import step_of
from .roofline import Clock, best_seconds

LATENT, ROTARY = 512, 64
WORKING_SET = 64 * 1024**2  # bytes of latents in 16 bits that a call goes through, in one layer
MAX_SEQUENCES = 8
SCALE = (128 + ROTARY) ** -0.5


@dataclass(frozen=True, slots=True)
class LatentTiming:
    """One call for one layer. ``kernel``: "decode", "chunk", or "gathered" for a decode step of gathered
    latents. ``num_bytes`` are those of the pages that it needs to read once."""

    kernel: str
    format: str
    heads: int
    context: int
    sequences: int
    seconds: float
    num_bytes: int
    flops: float


def time_latents(
    backend: AttentionBackend,
    name: str,
    *,
    heads: int,
    context: int,
    chunk: int,
    page_size: int,
    clock: Clock = time.perf_counter,
) -> Iterator[LatentTiming]:
    """A decode step over ``context`` positions, the same of one sequence through gathered latents, and a
    chunk of ``chunk`` rows at the end of one."""
    sequences = max(1, min(MAX_SEQUENCES, WORKING_SET // (context * 2 * (LATENT + ROTARY))))
    pages = -(-context // page_size)
    layer = LayerSpec(num_kv_heads=1, head_dim=LATENT, value_dim=ROTARY)
    spec = PoolSpec(
        layers=(layer,), num_pages=sequences * pages, page_size=page_size, k_format=name, v_format="bf16"
    )
    pool = backend.create_pool(spec)
    order = np.random.default_rng(0).permutation(sequences * pages)
    tables = order.reshape(sequences, pages).astype(np.int32)
    _fill(pool, step_of(np.arange(pages, dtype=np.int32)[None], context, context, page_size))
    pool.copy_pages([(page % pages, page) for page in range(pages, spec.num_pages)])
    runs = (
        ("decode", _attend, step_of(tables, context, 1, page_size), 5),
        ("gathered", _gather, step_of(tables[:1], context, 1, page_size), 1),  # slow
        ("chunk", _attend, step_of(tables[:1], context, min(chunk, context), page_size), 3),
    )
    for kernel, make, step, repeats in runs:
        seconds = best_seconds(make(pool, step, heads), repeats=repeats, clock=clock)
        seen = int((step.positions + 1).sum())
        yield LatentTiming(
            kernel,
            name,
            heads,
            context,
            step.num_sequences,
            seconds,
            num_bytes=step.num_sequences * context * (spec.page_bytes // page_size),
            flops=2.0 * heads * (LATENT + ROTARY + LATENT) * seen,
        )


def _fill(pool: KVPool, step: AttentionMetadata) -> None:
    rng = np.random.default_rng(1)
    keys, values = (
        mx.array(rng.standard_normal((step.num_tokens, 1, dim)).astype(np.float32)).astype(mx.bfloat16)
        for dim in (LATENT, ROTARY)
    )
    pool.begin_step(step)
    pool.write(0, keys, values)
    mx.eval(*pool.pending())


def _queries(step: AttentionMetadata, heads: int) -> tuple[mx.array, mx.array]:
    queries, rotary = (
        mx.random.normal((step.num_tokens, heads, dim)).astype(mx.bfloat16) for dim in (LATENT, ROTARY)
    )
    mx.eval(queries, rotary)
    return queries, rotary


def _attend(pool: KVPool, step: AttentionMetadata, heads: int) -> Callable[[], None]:
    queries, rotary = _queries(step, heads)

    def run() -> None:
        pool.begin_step(step)
        mx.eval(pool.attend(0, queries, AttendOptions(scale=SCALE, rotary=rotary)))

    return run


def _gather(pool: KVPool, step: AttentionMetadata, heads: int) -> Callable[[], None]:
    """What model code computes with dense latents: see octavo.engine.executor.adapt.latents."""
    queries, rotary = _queries(step, heads)

    def run() -> None:
        pool.begin_step(step)
        latents, keys = (rows.astype(mx.bfloat16) for rows in pool.gather(0))
        scores = rotary[:, :, None] @ keys.swapaxes(-1, -2)
        mx.eval(
            mx.fast.scaled_dot_product_attention(
                queries[:, :, None], latents, latents, scale=SCALE, mask=scores
            )
        )

    return run
