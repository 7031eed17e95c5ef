from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from format_rows import formats_and_dims, tricky_rows
from octavo.kernels import FORMAT_NAMES, page_format
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata
from octavo.kernels.reference.backend import ReferencePool
from octavo.kernels.reference.codecs import Codec, hadamard

pytestmark = pytest.mark.parity


def bits(array: mx.array) -> NDArray[np.unsignedinteger]:
    unsigned = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.dtype.size]
    return np.array(array.view(unsigned))


def as_bits(scales: NDArray[np.generic]) -> NDArray[np.unsignedinteger]:
    return scales.view(f"u{scales.dtype.itemsize}")


@pytest.mark.parametrize(("name", "head_dim"), formats_and_dims(8, 32, 40, 64, 96, 128, 256))
def test_codecs_are_bit_equal(name: str, head_dim: int) -> None:
    fmt, on_mlx = page_format(name), Codec(name)
    for kind, rows in tricky_rows(head_dim).items():
        codes, scales, storable = fmt.encode(rows)
        encoded = on_mlx.encode(mx.array(rows))
        np.testing.assert_array_equal(np.array(encoded.storable), storable, err_msg=kind)
        np.testing.assert_array_equal(bits(encoded.parts[0]), codes, err_msg=kind)
        if scales.shape[-1]:
            np.testing.assert_array_equal(bits(encoded.parts[1]), as_bits(scales), err_msg=kind)
        decoded = np.array(on_mlx.decode(encoded.parts))
        np.testing.assert_array_equal(
            decoded.view(np.uint32), fmt.dequantize(codes, scales).view(np.uint32), err_msg=kind
        )


@pytest.mark.parametrize("head_dim", [8, 40, 64, 96, 256])
def test_rotation_is_bit_equal(head_dim: int) -> None:
    from octavo.kernels.formats import hadamard as definition

    rows = tricky_rows(head_dim)["gauss"]
    np.testing.assert_array_equal(np.array(hadamard(mx.array(rows))), definition(rows))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_pool_stores_the_formats_bytes(name: str, dtype: mx.Dtype) -> None:
    layer = LayerSpec(num_kv_heads=3, head_dim=64, value_dim=64)
    spec = PoolSpec(layers=(layer,), num_pages=9, page_size=4, k_format=name, v_format="bf16")
    pool, rng = ReferencePool(spec), np.random.default_rng(1)
    slots = rng.permutation(36)[:20].astype(np.int32)
    keys = mx.array(rng.standard_normal((20, 3, 64)).astype(np.float32)).astype(dtype)
    at = np.arange(20, dtype=np.int32)
    pool.begin_step(
        AttentionMetadata(
            positions=at,
            q_start=np.array([0, 20], np.int32),
            kv_len=np.array([20], np.int32),
            groups=(GroupMetadata(slots=slots, page_table=np.arange(5, dtype=np.int32)[None]),),
            page_size=4,
        )
    )
    pool.write(0, keys, keys)
    mx.eval(*pool.pending())
    codes, scales, _ = page_format(name).store(np.array(keys.astype(mx.float32)))
    stored = [bits(array).reshape(9, 3, 4, -1) for array in pool._parts[0][0]]
    np.testing.assert_array_equal(stored[0][slots // 4, :, slots % 4], codes)
    if scales.shape[-1]:
        np.testing.assert_array_equal(stored[1][slots // 4, :, slots % 4], as_bits(scales))
    unwritten = np.setdiff1d(np.arange(36), slots)
    assert not stored[0][unwritten // 4, :, unwritten % 4].any()


def _addresses(pool: ReferencePool) -> list[int]:
    arrays = [array for layer in pool._parts for part in layer for array in part]
    return [np.array(array.view(mx.uint8), copy=False).__array_interface__["data"][0] for array in arrays]


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_steps_and_copies_write_in_place(name: str) -> None:
    """A pool that MLX copies at each step would need twice its memory."""
    layer = LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64)
    spec = PoolSpec(layers=(layer, layer), num_pages=64, page_size=16, k_format=name, v_format=name)
    pool, rng = ReferencePool(spec), np.random.default_rng(1)
    before = _addresses(pool)
    for position in range(3):
        pool.begin_step(
            AttentionMetadata(
                positions=np.array([position], np.int32),
                q_start=np.array([0, 1], np.int32),
                kv_len=np.array([position + 1], np.int32),
                groups=(
                    GroupMetadata(
                        slots=np.array([5 * 16 + position], np.int32), page_table=np.array([[5]], np.int32)
                    ),
                ),
                page_size=16,
            )
        )
        rows = mx.array(rng.standard_normal((1, 2, 64)).astype(np.float32))
        outs = []
        for index in range(2):
            pool.write(index, rows, rows)
            outs.append(pool.attend(index, rows, AttendOptions(scale=0.1)))
        mx.eval(outs, *pool.pending())
        pool.copy_pages([(5, 7 + position)])
        assert _addresses(pool) == before
