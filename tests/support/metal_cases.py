"""Shapes for the Metal kernels: head dims, group sizes, page sizes and pairs of formats.

Sequence lengths are 1, page - 1, page, page + 1 and 3 pages + 7."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from attention_backends import poison
from attention_cases import (
    EVERY_FORMAT_PAIR,
    Case,
    Outcome,
    as_numpy,
    build_metadata,
    shuffled_tables,
    whole_mask,
    with_whole,
)
from metal_backend import Emulator
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.metal.pool import MetalPool
from octavo.kernels.verify.oracle import OraclePool

TOLERANCES = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 6e-3}
"""Relative to the largest output: kernels compute in float32 and round once, at the end."""


def ragged(page_size: int, *, chunks: bool = True) -> tuple[tuple[int, int], ...]:
    """Return 5 decode rows of awkward lengths, and with ``chunks`` also 4 chunks."""
    lengths = (1, page_size - 1, page_size, page_size + 1, 3 * page_size + 7)
    decodes = tuple((length - 1, 1) for length in lengths)
    if not chunks:
        return decodes
    return (
        decodes[0],
        (0, page_size + 1),
        *decodes[1:3],
        (page_size - 1, 2),
        decodes[3],
        (2 * page_size, 7),
        decodes[4],
        (0, 3),
    )


def shape(name: str, head_dim: int, group: int, page_size: int, **rest: object) -> Case:
    return Case(
        name=f"{name}d{head_dim}g{group}p{page_size}",
        sequences=rest.pop("sequences", None) or ragged(page_size),  # type: ignore[arg-type]
        head_dim=head_dim,
        group=group,
        page_size=page_size,
        **rest,  # type: ignore[arg-type]
    )


def covering() -> Iterator[tuple[Case, tuple[str, str], mx.Dtype]]:
    """Cover each head dim, page size, format of K and V, extreme group and option at least once."""
    half, brain = mx.float16, mx.bfloat16
    fp4, bf16, fp16 = ("fp4", "fp4"), ("bf16", "bf16"), ("fp16", "fp16")
    yield shape("", 80, 3, 16), bf16, brain
    yield shape("", 96, 2, 64, kv_heads=1), fp16, half
    yield shape("", 128, 4, 32), fp4, brain
    yield shape("", 128, 8, 16, kv_heads=1), ("bf16", "fp4"), half
    yield shape("", 192, 5, 32, kv_heads=1), ("fp4", "fp16"), half
    yield shape("", 256, 2, 32, kv_heads=1), fp4, half
    yield shape("values", 192, 1, 16, value_dim=128), fp4, half
    yield LOOPING, fp4, half
    yield EVERYTHING, ("fp5", "fp5"), half
    yield EVERYTHING, ("int8", "int4"), half
    yield EVERYTHING, ("mxfp4", "nvfp4"), half
    yield EVERYTHING, ("affine8", "affine4"), half
    whole = shape("whole", 64, 2, 16, window=20, whole=(3, 19), sequences=((40, 1), (0, 45), (30, 20)))
    yield whole, fp4, half
    yield shape("", 80, 2, 16, kv_heads=1), ("int4", "int8"), half
    yield shape("", 192, 2, 32, kv_heads=1), ("affine4", "affine8"), half
    yield shape("values", 16, 2, 8, kv_heads=1, value_dim=64), ("nvfp4", "mxfp4"), half


EVERYTHING = shape(
    "everything",
    64,
    3,
    16,
    window=40,
    keep=20,
    sinks=True,
    softcap=8.0,
    sequences=((150, 1), (0, 33), (100, 17), (0, 1), (15, 1), (139, 5)),
)
LONG = shape(
    "long", 64, 2, 32, window=600, keep=3, sinks=True, kv_heads=1, sequences=((640, 1), (3, 1), (530, 1))
)
"""Split over keys: 20 tiles in the window and one kept tile; 17 tiles; one row is not split."""


LOOPING = shape("loop", 64, 8, 64, kv_heads=2, sequences=((127, 1), (100, 1)))


def whole_grid() -> Iterator[tuple[Case, tuple[str, str], mx.Dtype]]:
    yield shape("", 64, 1, 16), ("fp4", "fp4"), mx.float16
    yield shape("values", 256, 1, 16, kv_heads=1, value_dim=80), ("mxfp4", "nvfp4"), mx.float16
    yield shape("values", 256, 1, 16, kv_heads=1, value_dim=24), ("fp5", "fp5"), mx.float16
    yield shape("wide", 64, 16, 16, kv_heads=1), ("fp4", "fp4"), mx.float16
    yield shape("", 16, 2, 8, value_dim=24), ("fp4", "fp4"), mx.float16
    whole = shape("whole", 64, 2, 16, whole=(3, 19), sequences=((40, 1), (0, 45), (30, 20)))
    yield whole, ("fp4", "fp4"), mx.float16
    pairs, dtypes = itertools.cycle(EVERY_FORMAT_PAIR), itertools.cycle((mx.float16, mx.bfloat16))
    page_sizes = itertools.cycle((16, 32, 64, 32, 64, 16, 64))
    groups = itertools.cycle((1, 7, 2, 8, 4, 16, 7))
    for head_dim, group in zip((64, 80, 96, 128, 192, 256) * 2, groups, strict=False):
        case = shape("", head_dim, group, next(page_sizes), kv_heads=2 if group < 4 else 1)
        yield case, next(pair for pair in pairs if case.fits(*pair)), next(dtypes)
    for head_dim in (8, 16, 24, 32, 40, 112):
        case = shape("", head_dim, 2, 16)
        yield case, next(pair for pair in pairs if case.fits(*pair)), next(dtypes)
    windows = itertools.cycle(((1, 0), (16, 0), (17, 4), (33, 40), (64, 16)))
    for pair, (window, keep) in zip(EVERY_FORMAT_PAIR, windows, strict=False):
        case = shape(f"w{window}k{keep}", 64, 2, 16, window=window, keep=keep, sinks=True)
        yield case, pair, next(dtypes)


class WatchedPool(MetalPool):
    """A pool that tells the emulator that attention may read only rows that a query of the step sees."""

    def __init__(self, spec: PoolSpec, emulator: Emulator) -> None:
        super().__init__(spec, emulator.backend().library)
        self._emulator = emulator

    def begin_step(self, metadata: AttentionMetadata) -> None:
        super().begin_step(metadata)
        mask = visible_rows(metadata, self._spec.layers[0], self._spec.num_pages)
        names = ("k_codes", "k_scales", "v_codes", "v_scales")
        self._emulator.valid = dict.fromkeys(names, mask[:, None])


def visible_rows(metadata: AttentionMetadata, layer: LayerSpec, num_pages: int) -> NDArray[np.bool_]:
    """Return a mask of pool rows [num_pages * Hkv * page_size] that a query of the step sees."""
    size = metadata.page_size
    seen = np.zeros((num_pages, layer.num_kv_heads, size), bool)
    for b in range(metadata.num_sequences):
        rows = slice(metadata.q_start[b], metadata.q_start[b + 1])
        for position, last in zip(metadata.positions[rows], metadata.seen_until[rows], strict=True):
            keys = np.arange(last + 1)
            if layer.window is not None:
                keys = keys[(keys > position - layer.window) | (keys < layer.keep)]
            seen[metadata.only_group().page_table[b, keys // size], :, keys % size] = True
    return seen.ravel()


def run_watched(
    case: Case, formats: tuple[str, str], dtype: mx.Dtype, *, emulator: Emulator | None = None
) -> tuple[Outcome, Emulator]:
    """Write a case into a pool of NaN in two steps, then attend; reading an unseen row is an error."""
    emulator, rng = emulator or Emulator(), np.random.default_rng(0)
    pool = WatchedPool(case.spec(*formats), emulator)
    poison(pool)
    truth = OraclePool(pool.spec).layers[0]
    tables = shuffled_tables(case, rng, pool.spec.num_pages)
    num_heads = case.kv_heads * case.group
    sinks = rng.standard_normal(num_heads).astype(np.float32) if case.sinks else None
    history = [(0, old) for old, _ in case.sequences]
    for sequences in [history, case.sequences] if any(old for _, old in history) else [case.sequences]:
        metadata = build_metadata(sequences, tables, case.page_size)
        if sequences is case.sequences:
            metadata = with_whole(case, metadata)
        tokens = metadata.num_tokens
        keys = _random(rng, (tokens, case.kv_heads, case.head_dim), dtype)
        values = _random(rng, (tokens, case.kv_heads, case.layer.value_dim), dtype)
        pool.begin_step(metadata)
        pool.write(0, keys, values)
        mx.eval(pool.pending())
        truth.write(metadata, as_numpy(keys), as_numpy(values))
    queries = _random(rng, (tokens, num_heads, case.head_dim), dtype)
    scale = case.head_dim**-0.5
    out = pool.attend(
        0,
        queries,
        AttendOptions(scale=scale, sinks=None if sinks is None else mx.array(sinks), softcap=case.softcap),
    )
    assert out.dtype == dtype
    mask = whole_mask(case, metadata)
    want = truth.attend(
        metadata, as_numpy(queries), scale=scale, sinks=sinks, softcap=case.softcap, mask=mask
    )
    return Outcome(as_numpy(out).astype(np.float64), want), emulator


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return Gaussian rows with one channel eight times as large, as keys of real models have."""
    rows = rng.standard_normal(shape).astype(np.float32)
    rows[..., 3] *= 8
    return mx.array(rows).astype(dtype)


def case_id(value: object) -> str:
    if isinstance(value, Case):
        return value.name
    if isinstance(value, tuple):
        return "-".join(value)
    return str(value).rpartition(".")[2]
