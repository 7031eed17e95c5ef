from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from attention_cases import Case
from format_rows import tricky_rows
from metal_backend import PAGES, Emulator
from metal_cases import visible_rows
from metal_emulator import Count, Result
from octavo.kernels import page_format
from octavo.kernels.interface import LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata
from octavo.kernels.metal.launch import KernelLibrary
from octavo.kernels.metal.pool import MetalPool


def pages_read(result: Result, *names: str) -> Count:
    traffic = result.traffic
    return traffic.read(*(name for name in names or PAGES if name in traffic.reads))


def minimum_bytes(case: Case, formats: tuple[str, str]) -> int:
    """Return the bytes of all K and V that decode rows see, if each KV head is read once."""
    total = 0
    for old, _ in case.sequences:
        position = np.array([old], np.int32)
        pages = -(-(old + 1) // case.page_size)
        alone = AttentionMetadata(
            positions=position,
            q_start=np.array([0, 1], np.int32),
            kv_len=position + 1,
            groups=(GroupMetadata(slots=position, page_table=np.arange(pages, dtype=np.int32)[None]),),
            page_size=case.page_size,
        )
        rows = int(visible_rows(alone, case.layer, pages).sum())
        k, v = (page_format(name) for name in formats)
        total += rows * (k.row_bytes(case.layer.head_dim) + v.row_bytes(case.layer.value_dim))
    return total


def bits(array: mx.array) -> NDArray[np.unsignedinteger]:
    return np.array(array.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.dtype.size]))


def make_pool(
    emulator: Emulator, name: str, head_dim: int, *, tokens: int, heads: int = 1, value_dim: int | None = None
) -> MetalPool:
    layer = LayerSpec(num_kv_heads=heads, head_dim=head_dim, value_dim=value_dim or head_dim)
    spec = PoolSpec(
        layers=(layer,), num_pages=-(-tokens // 16) + 1, page_size=16, k_format=name, v_format=name
    )
    return MetalPool(spec, KernelLibrary(emulator.compile))


def one_sequence(slots: NDArray[np.int32], pages: int) -> AttentionMetadata:
    count = len(slots)
    return AttentionMetadata(
        positions=np.arange(count, dtype=np.int32),
        q_start=np.array([0, count], np.int32),
        kv_len=np.array([count], np.int32),
        groups=(GroupMetadata(slots=slots, page_table=np.arange(pages, dtype=np.int32)[None]),),
        page_size=16,
    )


def corner_rows(head_dim: int) -> NDArray[np.float32]:
    """Return ties of int8, values that saturate an E8M0 scale, and values that are not finite."""
    rng = np.random.default_rng(3)
    ties = rng.integers(-126, 126, (4, head_dim)).astype(np.float32) + np.float32(0.5)
    ties[:, 0] = 127
    largest = np.full((1, head_dim), np.finfo(np.float32).max, np.float32)
    spoilt = rng.standard_normal((2, head_dim)).astype(np.float32)
    spoilt[0, -1], spoilt[1, 0] = np.nan, -np.inf
    return np.concatenate([ties, largest, spoilt])


def check_bytes(
    name: str,
    head_dim: int,
    emulator: Emulator,
    *,
    subnormals: bool = True,
    limit: int | None = None,
    value_dim: int | None = None,
) -> None:
    fmt = page_format(name)
    rows = np.concatenate(
        [r for kind, r in tricky_rows(head_dim).items() if subnormals or kind != "subnormal"]
    )
    rows = rows[np.random.default_rng(0).permutation(len(rows))][:limit]
    rows = np.concatenate([rows, corner_rows(head_dim)])
    values = np.ascontiguousarray(rows[::-1, :value_dim])
    pool = make_pool(emulator, name, head_dim, tokens=len(rows), value_dim=value_dim)
    slots = np.random.default_rng(1).permutation(len(rows)).astype(np.int32)
    pool.begin_step(one_sequence(slots, pool.spec.num_pages))
    pool.write(0, mx.array(rows[:, None]), mx.array(values[:, None]))
    mx.eval(pool.pending())
    spoilt: set[int] = set()
    for part, written in enumerate((rows, values)):
        codes, scales, storable = fmt.store(written)
        stored = pool._parts[0][part]
        np.testing.assert_array_equal(bits(stored[0])[slots], codes)
        if scales.shape[-1]:
            np.testing.assert_array_equal(bits(stored[1])[slots], scales.view(f"u{scales.itemsize}"))
        spoilt |= set(np.flatnonzero(~storable).tolist())
    assert pool.nonfinite_tokens() == sorted(spoilt)
