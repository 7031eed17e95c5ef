"""The Metal quantize-and-write kernel stores the very bytes that the NumPy formats define."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from metal_backend import Emulator, needs_compiler
from metal_checks import bits, check_bytes, make_pool, one_sequence
from octavo.kernels import page_format

pytestmark = [needs_compiler, pytest.mark.timeout(300)]
FORMATS = ("bf16", "fp16", "fp4")


@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 96, 128, 192, 256])
def test_fp4_pages_are_bit_equal(head_dim: int) -> None:
    """All rows at head_dim 64; elsewhere as many as the lanes' arithmetic needs."""
    check_bytes("fp4", head_dim, Emulator(ftz=False), limit=None if head_dim == 64 else 700)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_16_bit_pages_are_bit_equal(name: str, head_dim: int) -> None:
    check_bytes(name, head_dim, Emulator(ftz=False))


def test_a_compiler_that_fuses_products_into_sums_changes_no_bit() -> None:
    check_bytes("fp4", 128, Emulator(ftz=False, extra_flags=("-ffp-contract=fast",)), limit=700)


def test_bytes_are_the_same_on_a_device_that_flushes_subnormals() -> None:
    """Except of rows that hold little else: theirs may differ in the sign of a zero."""
    check_bytes("fp4", 64, Emulator(ftz=True), subnormals=False)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_16_bit_activations_over_several_heads(name: str, dtype: mx.Dtype) -> None:
    fmt, rng = page_format(name), np.random.default_rng(2)
    emulator = Emulator()
    pool = make_pool(emulator, name, 64, tokens=21, heads=3)
    keys, values = (mx.array(rng.standard_normal((21, 3, 64)).astype(np.float32)).astype(dtype) for _ in "kv")
    slots = rng.permutation(pool.spec.num_pages * 16)[:21].astype(np.int32)
    pool.begin_step(one_sequence(slots, pool.spec.num_pages))
    pool.write(0, keys, values)
    mx.eval(pool.pending())
    assert pool.nonfinite_tokens() == []
    page, offset = np.divmod(slots, 16)
    for part, rows in enumerate((keys, values)):
        codes, scales, _ = fmt.store(np.array(rows.astype(mx.float32)))
        stored = [bits(array).reshape(-1, 3, 16, array.shape[-1]) for array in pool._parts[0][part]]
        np.testing.assert_array_equal(stored[0][page, :, offset], codes)
        if scales.shape[-1]:
            np.testing.assert_array_equal(stored[1][page, :, offset], scales.view(np.uint16))
        untouched = np.ones(stored[0].shape[:3:2], bool)
        untouched[page, offset] = False
        assert not stored[0].transpose(0, 2, 1, 3)[untouched].any()
    assert pool.nbytes == pool.spec.num_pages * pool.spec.page_bytes


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_become_zeros_and_are_reported(name: str, value: float) -> None:
    emulator = Emulator()
    pool = make_pool(emulator, name, 64, tokens=9, heads=2)
    rows = np.random.default_rng(3).standard_normal((9, 2, 64)).astype(np.float32)
    spoilt = rows.copy()
    spoilt[4, 1, 63], spoilt[7, 0, 0] = value, value
    slots = np.arange(9, dtype=np.int32)
    pool.begin_step(one_sequence(slots, pool.spec.num_pages))
    pool.write(0, mx.array(spoilt), mx.array(rows))
    mx.eval(pool.pending())
    assert pool.nonfinite_tokens() == [4, 7]
    codes, _, storable = page_format(name).store(spoilt)
    stored = bits(pool._parts[0][0][0]).reshape(-1, 2, 16, codes.shape[-1])[0].swapaxes(0, 1)[:9]
    np.testing.assert_array_equal(stored, codes)
    assert not stored[~storable].any()
