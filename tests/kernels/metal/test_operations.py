from __future__ import annotations

from collections import Counter

import mlx.core as mx
import pytest

from metal_backend import needs_compiler
from metal_cases import run_watched, shape

pytestmark = [pytest.mark.parity, needs_compiler]


def of_two_more_tiles(kernel: str, head_dim: int, group: int, keys: int, rows: int) -> Counter[str]:
    counts = []
    for tiles in (2, 4):
        case = shape(
            "", head_dim, group, 32, kv_heads=1, sequences=((keys * tiles - (1 if rows == 1 else 4), rows),)
        )
        _, emulator = run_watched(case, ("fp4", "fp4"), mx.float16)
        assert emulator.launches[kernel] == 1
        counts.append(Counter(emulator.ran(kernel)[-1].stats.operations))
    fewer, more = counts
    more.subtract(fewer)
    return +more


@pytest.mark.parametrize(("head_dim", "group", "shuffles"), [(128, 4, 4 * 15), (64, 1, 7)])
def test_decode_sums_products_transposed(head_dim: int, group: int, shuffles: int) -> None:
    found = of_two_more_tiles("decode", head_dim, group, 32, 1)
    assert found["simd_shuffle_xor"] == 2 * shuffles
    assert found["simd_max"] == 2 * group
    assert found["threadgroup_barrier"] == found["simd_sum"] == 0


@pytest.mark.parametrize(("head_dim", "keys", "parts"), [(128, 32, 1), (256, 16, 2)])
def test_a_chunk_multiplies_matrices(head_dim: int, keys: int, parts: int) -> None:
    found = of_two_more_tiles("chunk", head_dim, 1, keys, 64 // parts)
    products = 2 * 8 * (keys // 8) * (head_dim // 8) * 2 // parts
    assert found["simdgroup_multiply_accumulate"] == found["simdgroup_load"] == products
    assert found["simd_shuffle_xor"] == 2 * 8 * 2
    assert found["threadgroup_barrier"] == 2 * 2
    assert "simdgroup_store" not in found
