from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from attention_backends import BACKENDS, TestedBackend
from octavo.engine.executor.batch import slice_rows
from octavo.kernels.groups import LayerGroup
from octavo.kernels.interface import AttendOptions, LayerSpec, PagedKVCache, PoolSpec
from octavo.kernels.kv_cache import create_kv_cache, cut_into_chunks
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata
from octavo.kernels.residual import residual_starts

pytestmark = pytest.mark.parity

CHUNK, PAGE_SIZE, WIDTH = 32, 8, 16
TOLERANCE = 0.06
LAYER = LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64, window=CHUNK, chunked=True)
STEPS = (  # [start, stop) of each sequence
    ((0, 70), (0, 31), (0, 5)),
    ((70, 71), (31, 32), (5, 90)),
    ((71, 97), (32, 33), (90, 91)),
)


def spec(k_format: str = "bf16", v_format: str = "bf16") -> PoolSpec:
    return PoolSpec(
        layers=(LAYER,), num_pages=1 + 3 * WIDTH, page_size=PAGE_SIZE, k_format=k_format, v_format=v_format
    )


def step(work: tuple[tuple[int, int], ...], num_groups: int = 1) -> AttentionMetadata:
    tables = np.arange(1, 3 * WIDTH + 1, dtype=np.int32)[::-1].reshape(3, WIDTH)
    positions = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in work])
    owners = np.repeat(np.arange(3), [b - a for a, b in work])
    slots = tables[owners, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    first = residual_starts(positions, window=1, page_size=PAGE_SIZE)
    starts = np.where(positions < np.array([0, 40, 64])[owners], 0, first).astype(np.int32)
    group = GroupMetadata(slots=slots.astype(np.int32), page_table=np.ascontiguousarray(tables))
    return AttentionMetadata(
        positions=positions,
        q_start=np.cumsum([0, *(b - a for a, b in work)]).astype(np.int32),
        kv_len=np.array([b for _, b in work], np.int32),
        groups=(group,) if num_groups == 1 else (group, group._replace(starts=starts)),
        page_size=PAGE_SIZE,
    )


def run(cache: PagedKVCache, *, masked: bool) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    out = []
    for work in STEPS:
        metadata = step(work, len(cache.storages))
        tokens = metadata.num_tokens
        q, k, v = (
            mx.array(rng.standard_normal((tokens, heads, 64)).astype(np.float32)).astype(mx.bfloat16)
            for heads in (4, 2, 2)
        )
        seen = np.arange(int(metadata.kv_len.max()))[None]
        at = metadata.positions[:, None]
        mask = mx.array((seen <= at) & (seen // CHUNK == at // CHUNK)) if masked else None
        cache.begin_step(metadata)
        cache.write(0, k, v)
        got = cache.attend(0, q, AttendOptions(scale=0.125, mask=mask))
        mx.eval(got, *cache.pending())
        assert not cache.nonfinite_tokens()
        out.append(np.array(got.astype(mx.float32)))
    return out


def cache_of(backend: TestedBackend, some: PoolSpec, *, residual: bool, chunked: bool) -> PagedKVCache:
    group = LayerGroup(window=CHUNK, keep=0, members=(0,), chunked=chunked)
    if not chunked:
        some = replace(some, layers=(replace(LAYER, window=None, chunked=False),))
        group = replace(group, window=None)
    beside = [replace(group, window=11)] if residual else []
    pages = [some.num_pages] * (1 + len(beside))
    return create_kv_cache(backend.create(), some, [group], pages, residual=beside)


@pytest.mark.parametrize("formats", [("bf16", "bf16"), ("int8", "int8"), ("fp5", "fp4")], ids="/".join)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_chunks_equal_a_mask(backend: TestedBackend, formats: tuple[str, str]) -> None:
    got = run(cache_of(backend, spec(*formats), residual=False, chunked=True), masked=False)
    wanted = run(cache_of(BACKENDS[0], spec(*formats), residual=False, chunked=False), masked=True)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE if "fp4" in formats else 0.03)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.name != "metal"], ids=lambda one: one.name)
def test_chunks_with_a_residual_window_equal_a_mask(backend: TestedBackend) -> None:
    got = run(cache_of(backend, spec("fp5", "fp4"), residual=True, chunked=True), masked=False)
    wanted = run(cache_of(BACKENDS[0], spec("fp5", "fp4"), residual=True, chunked=False), masked=True)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE)


def test_a_row_has_bit_identical_results_alone_and_beside_others() -> None:
    cache = cache_of(BACKENDS[-1], spec(), residual=False, chunked=True)
    run(cache, masked=False)
    last = step(STEPS[-1])
    queries = mx.random.normal((last.num_tokens, 4, 64), key=mx.random.key(1)).astype(mx.bfloat16)

    def attend(metadata: AttentionMetadata, rows: slice) -> mx.array:
        cache.begin_step(metadata)
        return cache.attend(0, queries[rows], AttendOptions(scale=0.125))

    together = attend(last, slice(None))
    for row in range(last.num_tokens):
        alone = attend(slice_rows(last, row, row + 1), slice(row, row + 1))
        assert mx.array_equal(alone[0], together[row]), row


def test_a_step_within_first_chunks_is_left_as_it_is() -> None:
    metadata = step(((0, 3), (5, 32), (31, 32)))
    assert cut_into_chunks(metadata, CHUNK) is metadata


def test_unsupported_calls_over_chunks_are_refused() -> None:
    cache = cache_of(BACKENDS[0], spec(), residual=False, chunked=True)
    with pytest.raises(ValueError, match="layer 0 must not attend within chunks"):
        cache.gather(0)
    with pytest.raises(ValueError, match="positions from a chunk's start"):
        run(cache, masked=True)
    with pytest.raises(
        ValueError, match="chunks of 30 positions, which must be a multiple of page_size, got 8"
    ):
        create_kv_cache(
            BACKENDS[0].create(), spec(), [LayerGroup(window=30, keep=0, members=(0,), chunked=True)], [9]
        )
