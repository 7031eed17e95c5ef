from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from attention_cases import build_metadata
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.metal.attention_units import AttentionConfig
from octavo.kernels.metal.backend import MetalBackend
from octavo.kernels.metal.launch import KernelLibrary, padded
from octavo.kernels.metal.plan import (
    MAX_SPLITS,
    SPLIT_TILES,
    num_splits,
    num_tiles,
    plan_chunks,
    plan_decode,
    restore_order,
)

pytestmark = pytest.mark.parity


def step(*sequences: tuple[int, int]) -> AttentionMetadata:
    tables = [np.arange(-(-(old + new) // 16), dtype=np.int32) for old, new in sequences]
    return build_metadata(sequences, tables, 16)


@pytest.mark.parametrize(
    ("position", "window", "keep", "tiles"),
    [
        (0, None, 0, 1),
        (31, None, 0, 1),
        (32, None, 0, 2),
        (100, 1, 0, 1),
        (100, 5, 0, 1),  # positions 96 to 100: all in tile 3
        (100, 6, 0, 2),  # position 95 is in tile 2
        (100, 6, 4, 3),  # and tile 0
        (100, 6, 33, 4),  # tiles 0 and 1
        (100, 90, 33, 4),  # the window starts in tile 0, which the first 33 positions need anyway
        (100, 1000, 8, 4),
        (0, 1, 8, 1),
    ],
)
def test_tiles_that_a_row_reads(position: int, window: int | None, keep: int, tiles: int) -> None:
    assert num_tiles(np.array([position], np.int32), window, keep).tolist() == [tiles]
    keys = np.arange(position + 1)
    seen = keys if window is None else keys[(keys > position - window) | (keys < keep)]
    assert len(np.unique(seen // 32)) == tiles


def test_splits_depend_on_the_row_alone() -> None:
    tiles = np.array([1, SPLIT_TILES, SPLIT_TILES + 1, 3 * SPLIT_TILES, 200, 10_000], np.int32)
    assert num_splits(tiles).tolist() == [1, 1, 2, 3, 32, MAX_SPLITS]


@pytest.mark.parametrize(("length", "threadgroups"), [(512, 32), (2048, 128), (8192, 256), (32_768, 1024)])
def test_one_sequence_fills_a_gpu(length: int, threadgroups: int) -> None:
    """Each KV head and split is a threadgroup of at least 8 simdgroups."""
    assert 8 * len(plan_decode(step((length - 1, 1)), None, 0).items) >= threadgroups


@pytest.mark.parametrize("group", range(1, 17))
def test_simdgroups_share_query_heads_and_tiles(group: int) -> None:
    layer = LayerSpec(num_kv_heads=1, head_dim=256, value_dim=256)
    config = AttentionConfig(
        layer=layer,
        group=group,
        page_size=32,
        k_format="fp4",
        v_format="fp4",
        sinks=False,
        softcap=False,
    )
    assert config.heads <= 4
    assert (config.slices - 1) * config.heads < group <= config.slices * config.heads
    assert config.decode_simdgroups >= 8
    assert config.decode_simdgroups <= 32
    assert config.ranges % 2 == 0


def test_decode_rows_chunk_rows_and_their_order() -> None:
    """Rows 0, 4 and 5 decode, row 4 over 20 tiles; rows 1 to 3 are a chunk."""
    metadata = step((9, 1), (30, 3), (635, 1), (40, 1))
    decode, chunks = plan_decode(metadata, None, 0), plan_chunks(metadata, 2)
    parts = [[4, 2, first, first + 4] for first in range(0, 20, 4)]
    assert decode.items.tolist() == [[0, 0, 0, 1], *parts, [5, 3, 0, 2]]
    assert decode.joins.tolist() == [[0, 1, 0, 0], [1, 5, 0, 0], [6, 1, 0, 0]]
    assert decode.rows.tolist() == [0, 4, 5]
    assert chunks[:2].tolist() == [[1, 2, 1, 2], [3, 1, 1, 2]]
    assert chunks[2:].tolist() == [[0, 0, 0, 0], [1, 0, 0, 4], [2, 0, 0, 5]]
    window = plan_decode(metadata, 100, 0)
    assert window.joins.shape == (0, 4)
    assert window.items.tolist() == [[0, 0, 0, 1], [4, 2, 0, 4], [5, 3, 0, 2]]


def test_splits_cover_every_tile_once() -> None:
    for old in (200, 600, 1100, 5000, 40_000):
        items = plan_decode(step((old, 1)), None, 0).items
        assert items[0, 2] == 0
        assert items[-1, 3] == old // 32 + 1
        assert (items[1:, 2] == items[:-1, 3]).all()
        assert (items[:, 3] > items[:, 2]).all()


def test_a_step_of_decode_rows_launches_no_chunk() -> None:
    assert plan_chunks(step((9, 1), (3, 1)), 8).shape == (0, 4)


def test_rows_go_back_to_their_places() -> None:
    rows = [np.array(part, np.int32) for part in ([0, 4, 5], [1, 2, 3])]
    order = restore_order(*rows)
    assert order is not None
    assert np.concatenate(rows)[order].tolist() == [0, 1, 2, 3, 4, 5]
    assert restore_order(np.arange(3, dtype=np.int32), np.array([3], np.int32)) is None


@pytest.mark.parametrize(("shape", "want"), [((3,), (8,)), ((8,), (8,)), ((2, 3), (2, 4)), ((0,), (8,))])
def test_arrays_are_padded_to_eight(shape: tuple[int, ...], want: tuple[int, ...]) -> None:
    array = padded(np.ones(shape, np.int32))
    assert array.shape == want
    assert np.array(array).sum() == np.prod(shape)


def pool_spec(**change: object) -> PoolSpec:
    layer = LayerSpec(num_kv_heads=1, head_dim=64, value_dim=64)
    fields: dict[str, object] = {
        "layers": (layer,),
        "num_pages": 4,
        "page_size": 16,
        "k_format": "fp4",
        "v_format": "fp4",
    }
    return PoolSpec(**(fields | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 24}, "page_size must be a power of two .* got 24; use 16, 32 or 64"),
        ({"num_pages": 1, "page_size": 4}, "must hold 8 to .* rows .* got 4"),
        (
            {"layers": (LayerSpec(num_kv_heads=1, head_dim=20, value_dim=64),)},
            "head_dim must be a multiple of 8 from 8 to 512 .* got 20; use --backend reference",
        ),
        (
            {"layers": (LayerSpec(num_kv_heads=1, head_dim=64, value_dim=264),)},
            "value_dim must be .* got 264",
        ),
    ],
)
def test_pools_that_kernels_cannot_read_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MetalBackend(KernelLibrary()).create_pool(pool_spec(**change))


def test_wrong_shapes_are_refused_before_a_launch() -> None:
    pool = MetalBackend(KernelLibrary()).create_pool(pool_spec())
    with pytest.raises(ValueError, match="no step has begun"):
        pool.attend(0, mx.zeros((1, 1, 64)), AttendOptions(scale=1.0))
    with pytest.raises(ValueError, match=r"slots must lie in \[0, 64\)"):
        pool.begin_step(step((100, 1)))
    pool.begin_step(step((10, 1)))
    with pytest.raises(ValueError, match=r"keys must be \(1, 1, 64\)"):
        pool.write(0, mx.zeros((2, 1, 64)), mx.zeros((1, 1, 64)))
    with pytest.raises(ValueError, match="queries must be"):
        pool.attend(0, mx.zeros((2, 1, 64)), AttendOptions(scale=1.0))
    with pytest.raises(ValueError, match=r"sinks must be \(2,\), one per query head, got \(3,\)"):
        pool.attend(0, mx.zeros((1, 2, 64)), AttendOptions(scale=1.0, sinks=mx.zeros(3)))
    with pytest.raises(ValueError, match=r"query heads per KV head must be 1 to 16 .* got 17"):
        pool.attend(0, mx.zeros((1, 17, 64)), AttendOptions(scale=1.0))
