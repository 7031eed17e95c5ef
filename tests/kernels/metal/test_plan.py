from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from attention_cases import build_metadata
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.metal.backend import MetalBackend
from octavo.kernels.metal.launch import KernelLibrary
from octavo.kernels.metal.plan import MAX_SPLITS, SPLIT_TILES, num_splits, num_tiles

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
