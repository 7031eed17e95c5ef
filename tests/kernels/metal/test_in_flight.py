from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from attention_cases import build_metadata
from late_device import LateDevice, read
from metal_backend import Emulator, memory_of, needs_compiler
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec
from octavo.kernels.metal.launch import KernelLibrary
from octavo.kernels.metal.pool import MetalPool

pytestmark = [pytest.mark.parity, needs_compiler, pytest.mark.timeout(300)]

LAYERS = tuple(LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64) for _ in range(2))
SPEC = PoolSpec(layers=LAYERS, num_pages=14, page_size=16, k_format="fp4", v_format="bf16")
TABLES = [np.arange(11, dtype=np.int32), np.array([11, 12], np.int32)]
STEPS = (
    [(0, 3), (0, 17)],
    [(3, 1), (17, 1)],
    [(4, 1), (16, 3)],
    [(5, 1), (18, 1)],
    [(5, 1)],
    [(170, 1), (19, 1)],
)


def addresses(pool: MetalPool) -> list[int]:
    return [memory_of(array).ctypes.data for layer in pool._parts for part in layer for array in part]


def launch(pool: MetalPool, copies: Sequence[tuple[int, int]] = ()) -> list[mx.array]:
    rng, outs = np.random.default_rng(3), []
    for step in STEPS:
        metadata = build_metadata(step, TABLES[: len(step)], 16)
        pool.begin_step(metadata)
        for index in range(len(LAYERS)):
            keys, values, queries = (
                mx.array(rng.standard_normal((metadata.num_tokens, heads, 64)).astype(np.float32))
                for heads in (2, 2, 4)
            )
            pool.write(index, keys, values)
            outs.append(pool.attend(index, queries, AttendOptions(scale=0.125)))
        outs += pool.flags()
        if copies:
            pool.copy_pages(copies)
    return outs


def results(device: Emulator, pool_type: type[MetalPool] = MetalPool) -> list[NDArray[np.generic]]:
    pool = pool_type(SPEC, KernelLibrary(device.compile))
    before = addresses(pool)
    outs = launch(pool, [(0, 13), (11, 0), (13, 11)])  # swaps the first pages of both sequences
    assert not isinstance(device, LateDevice) or not device.order, "something ran before anybody waited"
    found = [read(out) for out in reversed(outs)]
    mx.eval(pool._last)
    assert addresses(pool) == before, "an array of the pool was copied"
    return found + [memory_of(array).copy() for layer in pool._parts for part in layer for array in part]


def equal(some: list[NDArray[np.generic]], others: list[NDArray[np.generic]]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(some, others, strict=True))


@pytest.fixture(scope="module")
def expected() -> list[NDArray[np.generic]]:
    return results(Emulator())


@pytest.mark.parametrize("seed", range(3))
def test_overlapped_steps_equal_steps_one_by_one(seed: int, expected: list[NDArray[np.generic]]) -> None:
    device = LateDevice(order_seed=seed)
    with device.in_place_of_mlx():
        assert equal(results(device), expected)
    assert device.num_out_of_order > 3, "this device might as well be in order"


class ReadsEarly(MetalPool):
    """A bug: attention does not wait for the step's write."""

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        before = self._last[layer]
        super().write(layer, keys, values)
        self._last[layer] = before


class WritesEarly(MetalPool):
    """A bug: a write does not wait for the previous step's attention."""

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        before = self._last[layer]
        out = super().attend(layer, queries, options)
        self._last[layer] = before
        return out


class CopiesEarly(MetalPool):
    """A bug: a copy waits for nothing."""

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        last = self._last
        self._last = [mx.array(np.zeros(8, bool)) for _ in last]
        super()._copy(pairs)


@pytest.mark.parametrize("bug", [ReadsEarly, WritesEarly, CopiesEarly])
def test_a_missing_dependency_gives_other_results(
    bug: type[MetalPool], expected: list[NDArray[np.generic]]
) -> None:
    assert equal(results(Emulator(), bug), expected), "in the order of launches nobody notices"
    found = []
    for seed in range(4):
        device = LateDevice(order_seed=seed)
        with device.in_place_of_mlx():
            found.append(equal(results(device, bug), expected))
    assert not all(found)
