"""Rows that are hard to quantize, and their expected bytes in a pool."""

from __future__ import annotations

import hashlib
import itertools

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from format_rows import holds
from octavo.kernels import FORMAT_NAMES, page_format
from octavo.kernels.cpu.backend import CpuPool
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def write_step(slots: NDArray[np.int32], page_size: int) -> AttentionMetadata:
    count = len(slots)
    return AttentionMetadata(
        positions=np.zeros(count, np.int32),
        q_start=np.arange(count + 1, dtype=np.int32),
        kv_len=np.ones(count, np.int32),
        groups=(GroupMetadata(slots=slots, page_table=(slots // page_size)[:, None].astype(np.int32)),),
        page_size=page_size,
    )


def hard_rows(count: int, heads: int, dim: int, seed: int) -> Floats:
    """Return rows [count, heads, dim]: Gaussian, outlier, subnormal, huge, tiny, zero and ties."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, heads, dim)).astype(np.float32)
    kind = np.arange(count) % 11
    rows[kind == 1, :, dim // 3] *= 40
    grid = np.array([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.0, -0.25, -5], np.float32)
    rows[kind == 2] = rng.choice(grid, (int((kind == 2).sum()), heads, dim))
    rows[kind == 3] *= np.float32(1e-41)
    rows[kind == 4] *= np.float32(2e37)
    rows[kind == 5] *= np.float32(3e-8)
    rows[kind == 6] = 0
    rows[kind == 7] *= np.float32(2e5)
    rows[kind == 8, :, 1:] = -0.0
    fine = np.array([0.125, 0.375, 0.875, 1.125, 1.875, 2.25, 3.75, 4.5, 5.5, 6.5, 7, -1.5], np.float32)
    rows[kind == 10] = rng.choice(fine, (int((kind == 10).sum()), heads, dim))
    rows[kind == 10, :, 0] = 7
    rows[kind == 9] = 0
    rows[kind == 9, :, 2] = 12 * 2.0**-24
    return rows


def any_rows(count: int, heads: int, dim: int, seed: int) -> Floats:
    """Return rows [count, heads, dim] of finite floats; the last quarter has one NaN or infinity each."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, (count, heads, dim), dtype=np.uint32)
    size = rng.integers(0, 251, (count, heads, 1), dtype=np.uint32)
    near = size + rng.integers(0, 4, (count, heads, dim), dtype=np.uint32)
    alike = (np.arange(count) % 3 == 0)[:, None, None]
    rows: Floats = np.where(alike, bits & np.uint32(0x807FFFFF) | near << np.uint32(23), bits).view(
        np.float32
    )
    rows[~np.isfinite(rows)] = 0
    for row in rows[count - count // 4 :]:
        row[rng.integers(heads), rng.integers(dim)] = rng.choice([np.nan, np.inf, -np.inf])
    return rows


def expected_pages(spec: PoolSpec, slots: NDArray[np.int32], keys: Floats, values: Floats) -> Bytes:
    """Return pages [num_pages, Hkv, bytes] as NumPy formats write them into a pool of zeros."""
    heads = spec.layers[0].num_kv_heads
    parts = []
    for name, rows in ((spec.k_format, keys), (spec.v_format, values)):
        for stored in page_format(name).store(rows)[:2]:
            width = stored.shape[-1] * stored.dtype.itemsize
            raw = np.ascontiguousarray(stored).view(np.uint8).reshape(*stored.shape[:-1], width)
            pages = np.zeros((spec.num_pages, spec.page_size, heads, width), np.uint8)
            pages[slots // spec.page_size, slots % spec.page_size] = raw
            parts.append(pages.swapaxes(1, 2).reshape(spec.num_pages, heads, -1))
    return np.concatenate(parts, axis=-1)


def written_pages(
    spec: PoolSpec, slots: NDArray[np.int32], keys: mx.array, values: mx.array
) -> tuple[Bytes, list[int]]:
    pool = CpuPool(spec)
    pool.begin_step(write_step(slots, spec.page_size))
    pool.write(0, keys, values)
    mx.eval(pool.pending())
    return np.array(pool._layers[0]), pool.nonfinite_tokens()


def make_spec(k_format: str, v_format: str, *, dim: int, value_dim: int, page_size: int) -> PoolSpec:
    layer = LayerSpec(num_kv_heads=2, head_dim=dim, value_dim=value_dim)
    return PoolSpec(layers=(layer,), num_pages=9, page_size=page_size, k_format=k_format, v_format=v_format)


def largest_reading_error() -> float:
    worst = 0.0
    for name, dim in itertools.product(FORMAT_NAMES, (64, 80, 96, 128, 192)):
        pages = page_format(name)
        if not holds(name, dim) or pages.rotates:
            continue
        rows = hard_rows(44, 2, dim, 3)
        layer = LayerSpec(num_kv_heads=2, head_dim=dim, value_dim=dim)
        pool = CpuPool(PoolSpec(layers=(layer,), num_pages=44, page_size=1, k_format=name, v_format=name))
        pool.begin_step(write_step(np.arange(44, dtype=np.int32), 1))
        pool.write(0, mx.array(rows), mx.array(rows))
        mx.eval(pool.pending())
        read = np.array(pool.attend(0, mx.zeros((44, 2, dim)), AttendOptions(scale=1.0)))
        codes, scales, _ = pages.store(rows)
        want = pages.dequantize(codes, scales)
        largest = np.abs(want).max(axis=-1, keepdims=True)
        worst = max(worst, float((np.abs(read - want) / np.maximum(largest, 1e-30)).max()))
    return worst


def digest() -> str:
    """Return SHA-256 over pages of many shapes: equal at every instruction set."""
    total = hashlib.sha256()
    for dim, page_size in ((8, 1), (40, 4), (64, 16), (96, 8), (128, 32), (256, 16)):
        for name in (name for name in FORMAT_NAMES if holds(name, dim)):
            spec = make_spec(name, name, dim=dim, value_dim=dim, page_size=page_size)
            count = min(spec.num_pages * page_size, 100)
            slots = np.arange(count, dtype=np.int32)
            keys, values = (mx.array(hard_rows(count, 2, dim, seed)) for seed in (1, 2))
            for rows in ((keys, values), [mx.array(any_rows(count, 2, dim, seed)) for seed in (3, 4)]):
                pages, reported = written_pages(spec, slots, *rows)
                total.update(pages.tobytes() + str(reported).encode())
    return total.hexdigest()
