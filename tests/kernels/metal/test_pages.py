from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from metal_backend import Emulator, needs_compiler
from metal_checks import bits, check_bytes, make_pool, one_sequence
from metal_emulator import NO_CONTRACTION
from octavo.kernels import page_format
from octavo.kernels.metal import units
from octavo.kernels.metal.units import METAL_FORMATS as FORMATS

PACKED = ("fp5", "int8", "int4", "mxfp4", "nvfp4", "affine8", "affine4")
pytestmark = [pytest.mark.parity, needs_compiler, pytest.mark.timeout(300)]


@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_fp4_pages_are_bit_equal(head_dim: int) -> None:
    check_bytes("fp4", head_dim, Emulator(ftz=False), limit=None if head_dim == 64 else 700)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_16_bit_pages_are_bit_equal(name: str, head_dim: int) -> None:
    check_bytes(name, head_dim, Emulator(ftz=False))


@pytest.mark.parametrize(
    ("name", "head_dim"), [(name, dim) for i, name in enumerate(PACKED) for dim in (64, (128, 192)[i % 2])]
)
def test_pages_of_the_other_formats_are_bit_equal(name: str, head_dim: int) -> None:
    flags = NO_CONTRACTION if head_dim == 128 else ()
    check_bytes(name, head_dim, Emulator(ftz=False, extra_flags=flags), limit=None if head_dim == 64 else 300)


def test_a_format_without_kernels_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(units._FORMATS, "int8")
    with pytest.raises(ValueError, match="no Metal kernel for int8 pages; use bf16, fp16"):
        make_pool(Emulator(), "int8", 64, tokens=9)


def test_rows_that_no_group_divides_are_refused() -> None:
    with pytest.raises(ValueError, match="affine4 packs rows of a multiple of 64 values, got head_dim 80"):
        make_pool(Emulator(), "affine4", 80, tokens=9)


def test_a_compiler_that_fuses_no_products_into_sums_changes_no_bit() -> None:
    check_bytes("fp4", 128, Emulator(ftz=False, extra_flags=NO_CONTRACTION), limit=700)


def test_bytes_are_the_same_on_a_device_that_flushes_subnormals() -> None:
    """Rows of subnormals may differ in the sign of a zero."""
    check_bytes("fp4", 64, Emulator(ftz=True), subnormals=False)


@pytest.mark.parametrize(
    ("name", "dtype"), list(zip(FORMATS, [mx.float16, mx.bfloat16] * len(FORMATS), strict=False))
)
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
            np.testing.assert_array_equal(stored[1][page, :, offset], scales.view(f"u{scales.itemsize}"))
        untouched = np.ones(stored[0].shape[:3:2], bool)
        untouched[page, offset] = False
        assert not stored[0].transpose(0, 2, 1, 3)[untouched].any()
    assert pool.nbytes == pool.spec.num_pages * pool.spec.page_bytes


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
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
