"""Checks of pages that kernels write in place."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from attention_cases import build_metadata
from metal_backend import Emulator, memory_of
from metal_checks import bits, pages_read
from octavo.kernels.interface import LayerSpec, PoolSpec
from octavo.kernels.metal.launch import KernelLibrary
from octavo.kernels.metal.pool import MetalPool

PAIRS = [(0, 2), (5, 1), (2, 3), (0, 6)]
"""The third copy must wait for the first."""


def check_copies(
    formats: tuple[str, str], head_dim: int, page_size: int, device: Emulator | None = None
) -> Emulator:
    """Copy PAIRS in a pool of random bytes; each byte must be moved once."""
    device = Emulator() if device is None else device
    layers = tuple(LayerSpec(num_kv_heads=heads, head_dim=head_dim, value_dim=64) for heads in (1, 3))
    spec = PoolSpec(layers=layers, num_pages=9, page_size=page_size, k_format=formats[0], v_format=formats[1])
    pool, rng = MetalPool(spec, KernelLibrary(device.compile)), np.random.default_rng(7)
    arrays = [array for layer in pool._parts for part in layer for array in part]
    want = []
    for array in arrays:
        memory = memory_of(array)
        memory[:] = rng.integers(0, 1 << 16, memory.shape)
        want.append(memory.copy().reshape(9, -1))
    pool.copy_pages(PAIRS)
    mx.eval(pool._last)
    for array, pages in zip(arrays, want, strict=True):
        for source, target in PAIRS:
            pages[target] = pages[source]
        np.testing.assert_array_equal(bits(array).reshape(9, -1), pages)
    launches = [result.traffic for result in device.ran("copy")]
    assert len(launches) == 2 * len(layers)
    read = [pages_read(result) for result in device.ran("copy")]
    written = [
        traffic.written(*(name for name in traffic.writes if name.startswith("to_"))) for traffic in launches
    ]
    for counts in (read, written):
        assert sum(count.bytes for count in counts) == spec.page_bytes * len(PAIRS)
        assert page_size < 16 or all(count.line_ratio == 1.0 for count in counts)
    return device


def check_flags(tokens: int) -> None:
    layers = tuple(LayerSpec(num_kv_heads=heads, head_dim=64, value_dim=64) for heads in (1, 9, 2))
    spec = PoolSpec(layers=layers, num_pages=2, page_size=16, k_format="fp4", v_format="int8")
    pool = MetalPool(spec, KernelLibrary(Emulator().compile))
    for spoilt in (((0, 0, 2), (1, 1, 0)), ((1, 0, 1),), ()):
        pool.begin_step(build_metadata([(0, tokens)], [np.array([0], np.int32)], 16))
        for index, layer in enumerate(layers):
            rows = np.ones((2, tokens, layer.num_kv_heads, 64), np.float32)
            for at, part, token in spoilt:
                if at == index:
                    rows[part, token, -part, 63] = np.inf
            pool.write(index, mx.array(rows[0]), mx.array(rows[1]))
        (flags,) = pool.flags()
        mx.eval(flags, pool.pending())
        assert flags.shape == (tokens,)
        assert np.flatnonzero(np.array(flags)).tolist() == pool.nonfinite_tokens()
        assert pool.nonfinite_tokens() == sorted(token for _, _, token in spoilt)
