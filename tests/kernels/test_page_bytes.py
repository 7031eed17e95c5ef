from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attention_backends import BACKENDS, TestedBackend
from attention_cases import with_table
from cpu_pages import hard_rows, write_step
from octavo.kernels import FORMAT_NAMES, FORMATS_WITH_KERNELS, page_format
from octavo.kernels.interface import KVPool, LayerSpec, PoolSpec
from octavo.kernels.page_bytes import PageBytes, convert_pages

pytestmark = pytest.mark.parity

LAYERS = (
    LayerSpec(num_kv_heads=2, head_dim=64, value_dim=128),
    LayerSpec(num_kv_heads=3, head_dim=128, value_dim=64),
)


def make_spec(k_format: str, v_format: str, *, page_size: int, num_pages: int = 7) -> PoolSpec:
    return PoolSpec(
        layers=LAYERS, num_pages=num_pages, page_size=page_size, k_format=k_format, v_format=v_format
    )


def fill(pool: KVPool, seed: int) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    slots = np.arange(pool.spec.num_pages * pool.spec.page_size - 3, dtype=np.int32)
    written = []
    pool.begin_step(write_step(slots, pool.spec.page_size))
    for index, layer in enumerate(pool.spec.layers):
        keys, values = (
            np.clip(hard_rows(len(slots), layer.num_kv_heads, dim, seed + index), -6e4, 6e4)
            for dim in (layer.head_dim, layer.value_dim)
        )
        pool.write(index, mx.array(keys), mx.array(values))
        written.append((keys, values))
    mx.eval(pool.pending())
    return written


def random_bytes(spec: PoolSpec, count: int, seed: int) -> PageBytes:
    return np.random.default_rng(seed).integers(0, 256, (count, spec.page_bytes), np.uint8)


@pytest.mark.parametrize("name", FORMATS_WITH_KERNELS)
def test_every_backend_gives_the_same_bytes(name: str) -> None:
    spec = make_spec(name, "bf16", page_size=8)
    pages = [5, 0, 6]
    read = []
    for backend in BACKENDS:
        pool = backend.create().create_pool(spec)
        fill(pool, seed=3)
        read.append(pool.read_pages(pages))
    assert read[0].any()
    np.testing.assert_array_equal(read[0], read[1])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@settings(max_examples=25)
@given(data=st.data())
def test_pages_return_as_they_were(backend: TestedBackend, data: st.DataObject) -> None:
    names = st.sampled_from(FORMATS_WITH_KERNELS)
    spec = make_spec(data.draw(names), data.draw(names), page_size=data.draw(st.sampled_from([1, 2, 8, 16])))
    pages = data.draw(st.lists(st.integers(0, spec.num_pages - 1), min_size=1, unique=True))
    pool = backend.create().create_pool(spec)
    fill(pool, seed=5)
    everywhere = list(range(spec.num_pages))
    before, new = pool.read_pages(everywhere), random_bytes(spec, len(pages), data.draw(st.integers(0, 99)))
    pool.write_pages(pages, new)
    want = before.copy()
    want[pages] = new
    np.testing.assert_array_equal(pool.read_pages(everywhere), want)
    assert pool.read_pages([]).shape == (0, spec.page_bytes)
    assert not np.shares_memory(pool.read_pages([0]), pool.read_pages([0]))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_pool_attends_over_pages_that_were_put_there(backend: TestedBackend) -> None:
    spec = make_spec("fp4", "bf16", page_size=8)
    source, target = (backend.create().create_pool(spec) for _ in range(2))
    fill(source, seed=7)
    target.write_pages([6, 2], source.read_pages([1, 2]))
    step = write_step(np.array([15], np.int32), 8)
    dense = []
    for pool, table in ((source, [1, 2]), (target, [6, 2])):
        whole = replace(step, kv_len=np.array([16], np.int32))
        pool.begin_step(with_table(whole, np.array([table], np.int32)))
        dense.append([np.array(part) for index in range(2) for part in pool.gather_sequences(index)])
    for want, got in zip(*dense, strict=True):
        np.testing.assert_array_equal(got, want)
        assert want.any()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_pages_outside_the_pool_are_refused(backend: TestedBackend) -> None:
    spec = make_spec("fp4", "bf16", page_size=8)
    pool = backend.create().create_pool(spec)
    data = random_bytes(spec, 2, 0)
    wrong: tuple[tuple[list[int], Any, str], ...] = (
        ([0, 7], data, "page 7 lies outside"),
        ([0, -1], data, "page -1 lies outside"),
        ([1, 1], data, "different"),
        ([1], data, r"got uint8 \(2,"),
        ([0, 1], data[:, :-1], "2 pages take"),
        ([0, 1], data.view(np.int8), "got int8"),
    )
    for pages, given_data, words in wrong:
        with pytest.raises(ValueError, match=words):
            pool.write_pages(pages, given_data)
    with pytest.raises(ValueError, match="page 9"):
        pool.read_pages([9])
    assert not pool.read_pages(range(7)).any(), "a refused write changed the pool"


@pytest.mark.parametrize("k_format", FORMAT_NAMES)
@pytest.mark.parametrize(("old", "new"), [(8, 8), (8, 2), (2, 8), (16, 8)])
def test_another_page_size_keeps_every_bit(k_format: str, old: int, new: int) -> None:
    specs = [make_spec(k_format, "fp4", page_size=size, num_pages=48 // size) for size in (old, new)]
    pools = [BACKENDS[0].create().create_pool(spec) for spec in specs]
    for pool in pools:
        fill(pool, seed=11)
    whole, want = (pool.read_pages(range(pool.spec.num_pages)) for pool in pools)
    np.testing.assert_array_equal(convert_pages(specs[0], whole, specs[1]), want)
    short = convert_pages(specs[0], whole[:1], specs[1])
    assert len(short) == old // new, "positions that fill no page are left out"
    np.testing.assert_array_equal(short, want[: len(short)])


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_converted_pages_equal_pages_stored_in_the_format(name: str) -> None:
    source, target = (make_spec(k, "bf16", page_size=size) for k, size in (("bf16", 8), (name, 4)))
    pool = BACKENDS[0].create().create_pool(source)
    fill(pool, seed=13)
    got = convert_pages(source, pool.read_pages([2, 3]), target)
    step = replace(write_step(np.array([31], np.int32), 8), kv_len=np.array([16], np.int32))
    pool.begin_step(with_table(step, np.array([[2, 3]], np.int32)))
    keys, values = (np.array(part.astype(mx.float32))[0] for part in pool.gather_sequences(0))
    parts = []
    for fmt, rows in ((page_format(name), keys), (page_format("bf16"), values)):
        for stored in fmt.store(rows)[:2]:
            raw = np.ascontiguousarray(stored).view(np.uint8)
            parts.append(raw.reshape(2, 4, -1).swapaxes(0, 1))
    want = np.concatenate(parts, axis=-1).reshape(4, -1)
    np.testing.assert_array_equal(got[:, : want.shape[1]], want)


def test_values_that_the_new_format_cannot_hold_are_refused() -> None:
    source, target = (make_spec(name, "bf16", page_size=8) for name in ("bf16", "fp16"))
    data = np.zeros((1, source.page_bytes), np.uint8)
    data[0, :2] = np.array([0x7F00], np.uint16).view(np.uint8)  # 1.7e38 as bfloat16
    with pytest.raises(ValueError, match="fp16 cannot store"):
        convert_pages(source, data, target)
    with pytest.raises(ValueError, match="same layers"):
        convert_pages(source, data, replace(target, layers=LAYERS[:1]))
