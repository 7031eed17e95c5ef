"""Timing of attention and linear layers over working sets larger than any cache.

Shapes are those of one layer of Qwen3-0.6B: 16 query heads, 8 K/V heads, head_dim 128, hidden 1024,
intermediate 3072.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from octavo.kernels import page_format
from octavo.kernels.channel_weights import BITS, QUANTIZE
from octavo.kernels.interface import AttendOptions, AttentionBackend, KVPool, LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata, Ints

from .roofline import Clock, best_seconds

QUERY_HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
MATRICES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))  # qkv; o; gate and up; down
WORKING_SET = 512 * 1024**2  # bytes read by a timed pass
DECODE_POSITIONS = 32 * 1024  # context of a decode step, summed over its sequences
MAX_SEQUENCES = 32
FILL_TOKENS = 256


Multiply = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Timing:
    """Rules for timing: the best of ``repeats`` passes over ``working_set`` bytes, by ``clock``.

    A pass has fewer layers if all layers would take more than ``longest`` seconds. Shorter passes are
    repeated until they take ``longest`` seconds together.
    """

    working_set: int = field(default_factory=lambda: WORKING_SET)
    repeats: int = 3
    clock: Clock = time.perf_counter
    longest: float = 0.25

    def seconds_of_layer(self, run: Callable[[int], object], num_layers: int = 1) -> float:
        """Return seconds per layer; ``run(n)`` makes a pass over the first n of ``num_layers`` layers."""
        seconds = self._timed(run, 1)
        if seconds < 4 * self.longest:
            seconds = min(seconds, self._timed(run, 1))
        if seconds >= self.longest:
            return seconds
        fits = num_layers if seconds <= 0 else int(self.longest / seconds)
        count = max(1, min(num_layers, fits))
        repeats = max(self.repeats, fits // count)
        return best_seconds(lambda: run(count), repeats=repeats, clock=self.clock) / count

    def _timed(self, run: Callable[[int], object], num_layers: int) -> float:
        began = self.clock()
        run(num_layers)
        return self.clock() - began


QUICK = Timing(working_set=32 * 1024**2, repeats=5, clock=time.process_time)
"""Rules to time kernels on one thread by processor time, in a few seconds per format."""


@dataclass(frozen=True, slots=True)
class WeightKind:
    """A quantization of weights in MLX's terms; ``channels`` names a format with one scale per channel."""

    mode: str
    bits: int
    group_size: int
    channels: str | None = None


WEIGHT_KINDS = {
    "bf16": None,
    **{f"int{bits}": WeightKind("affine", bits, 64) for bits in (8, 6, 5, 4, 3, 2)},
    "mxfp4": WeightKind("mxfp4", 4, 32),
    "nvfp4": WeightKind("nvfp4", 4, 16),
    **{name: WeightKind("affine", bits, 64, name) for name, bits in BITS.items()},
}


@dataclass(frozen=True, slots=True)
class AttentionTiming:
    """Time of one call for one layer; ``num_bytes`` counts the bytes of pages that it reads or writes."""

    kernel: str
    format: str
    context: int
    sequences: int
    seconds: float
    num_bytes: int
    flops: float


@dataclass(frozen=True, slots=True)
class LinearTiming:
    weights: str
    rows: int
    seconds: float
    num_bytes: int
    flops: float


def time_attention(
    backend: AttentionBackend,
    name: str,
    *,
    context: int,
    chunk: int,
    page_size: int,
    timing: Timing = Timing(),
) -> Iterator[AttentionTiming]:
    """Time a decode step over ``context`` positions, a chunk of the last ``chunk`` rows, and a write."""
    sequences = max(1, min(MAX_SEQUENCES, DECODE_POSITIONS // context))
    pages = -(-context // page_size)
    row_bytes = 2 * KV_HEADS * page_format(name).row_bytes(HEAD_DIM)
    num_layers = max(1, min(64, timing.working_set // (sequences * context * row_bytes)))
    layer = LayerSpec(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, value_dim=HEAD_DIM)
    pool = backend.create_pool(
        PoolSpec(
            layers=(layer,) * num_layers,
            num_pages=sequences * pages,
            page_size=page_size,
            k_format=name,
            v_format=name,
        )
    )
    tables = (
        np.random.default_rng(0).permutation(sequences * pages).reshape(sequences, pages).astype(np.int32)
    )
    _fill(pool)
    pair_flops = 4.0 * QUERY_HEADS * HEAD_DIM
    seen = sequences * context
    seconds = _attend_seconds(pool, step_of(tables, context, 1, page_size), timing)
    yield AttentionTiming("decode", name, context, sequences, seconds, seen * row_bytes, seen * pair_flops)
    rows = min(chunk, context)
    step = step_of(tables[:1], context, rows, page_size)
    seen = rows * context - rows * (rows - 1) // 2
    seconds = _attend_seconds(pool, step, timing)
    yield AttentionTiming("chunk", name, context, 1, seconds, context * row_bytes, seen * pair_flops)
    yield AttentionTiming(
        "write", name, context, 1, _write_seconds(pool, step, timing), rows * row_bytes, 0.0
    )


def time_linear(
    rows: tuple[int, ...], weights: Sequence[str], *, native: bool, timing: Timing = Timing()
) -> Iterator[LinearTiming]:
    """Time a layer for each kind of weights, with MLX's operations unless ``native``."""
    for name in weights:
        layers, layer_bytes = _layers(WEIGHT_KINDS[name], timing.working_set, native=native)
        parameters = sum(outputs * inputs for outputs, inputs in MATRICES)
        for count in rows:
            xs = [mx.random.normal((count, inputs)).astype(mx.bfloat16) for _, inputs in MATRICES]
            mx.eval(xs)
            seconds = timing.seconds_of_layer(functools.partial(_multiply_all, layers, xs), len(layers))
            yield LinearTiming(name, count, seconds, layer_bytes, 2.0 * parameters * count)


def _fill(pool: KVPool) -> None:
    spec, rng = pool.spec, np.random.default_rng(1)
    pages = min(spec.num_pages, max(1, FILL_TOKENS // spec.page_size))
    table = np.arange(pages, dtype=np.int32)[None]
    step = step_of(table, pages * spec.page_size, pages * spec.page_size, spec.page_size)
    rows = mx.array(rng.standard_normal((step.num_tokens, KV_HEADS, HEAD_DIM)).astype(np.float32))
    pool.begin_step(step)
    for layer in range(len(spec.layers)):
        pool.write(layer, rows.astype(mx.bfloat16), rows.astype(mx.bfloat16))
    mx.eval(*pool.pending())
    pool.copy_pages([(page % pages, page) for page in range(pages, spec.num_pages)])


def step_of(tables: Ints, context: int, rows: int, page_size: int) -> AttentionMetadata:
    """Return a step with the last ``rows`` positions of each sequence of ``context`` positions."""
    return AttentionMetadata.of([(context - rows, context)] * len(tables), tables, page_size=page_size)


def _attend_seconds(pool: KVPool, step: AttentionMetadata, timing: Timing) -> float:
    queries = mx.random.normal((step.num_tokens, QUERY_HEADS, HEAD_DIM)).astype(mx.bfloat16)
    decodes = step.num_tokens == step.num_sequences
    mx.eval(queries)
    pool.begin_step(step)

    def attend(num_layers: int) -> None:
        options = AttendOptions(scale=HEAD_DIM**-0.5)
        mx.eval([pool.attend(layer, queries, options) for layer in range(num_layers)])

    return timing.seconds_of_layer(attend, len(pool.spec.layers) if decodes else 1)


def _write_seconds(pool: KVPool, step: AttentionMetadata, timing: Timing) -> float:
    rows = mx.random.normal((step.num_tokens, KV_HEADS, HEAD_DIM)).astype(mx.bfloat16)
    mx.eval(rows)

    def write(_num_layers: int) -> None:
        pool.begin_step(step)
        pool.write(0, rows, rows)
        mx.eval(*pool.pending())

    return timing.seconds_of_layer(write)


def _multiply_all(layers: list[list[Multiply]], xs: list[mx.array], num_layers: int) -> None:
    mx.eval([multiply(x) for layer in layers[:num_layers] for multiply, x in zip(layer, xs, strict=True)])


def _layers(kind: WeightKind | None, working_set: int, *, native: bool) -> tuple[list[list[Multiply]], int]:
    mx.random.seed(0)
    dense = [mx.random.normal((outputs, inputs)).astype(mx.bfloat16) for outputs, inputs in MATRICES]
    parts = [(weight,) if kind is None else _quantized(weight, kind) for weight in dense]
    mx.eval(parts)
    layer_bytes = sum(part.nbytes for matrix in parts for part in matrix)
    count = max(1, working_set // layer_bytes) if native else 1
    return [[_multiply(matrix, kind, native=native) for matrix in parts] for _ in range(count)], layer_bytes


def _quantized(weight: mx.array, kind: WeightKind) -> tuple[mx.array, ...]:
    if kind.channels is not None:
        return QUANTIZE[kind.channels](weight, kind.group_size)
    return tuple(mx.quantize(weight, kind.group_size, kind.bits, mode=kind.mode))


def _multiply(matrix: tuple[mx.array, ...], kind: WeightKind | None, *, native: bool) -> Multiply:
    if native:
        from octavo.kernels import _ext

        if kind is None:
            packed = _ext.pack_dense(matrix[0])
        elif kind.mode == "affine":
            packed = _ext.pack_affine(*matrix, group_size=kind.group_size, bits=kind.bits)
        else:
            packed = _ext.pack_fp4(*matrix, mode=kind.mode)
        return lambda x: _ext.linear(x, packed)
    if kind is None:
        return lambda x: x @ matrix[0].T
    codes, scales, biases = matrix[0], matrix[1], matrix[2] if len(matrix) > 2 else None
    return lambda x: mx.quantized_matmul(
        x, codes, scales, biases, True, group_size=kind.group_size, bits=kind.bits, mode=kind.mode
    )
