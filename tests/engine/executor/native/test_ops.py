from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import LayerNorm, RMSNorm
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models import gear, gemma3_text, minimax_m3_vl, rope_utils

from native import require_extension

pytestmark = pytest.mark.parity

_ext = require_extension()

FLOATS = {mx.bfloat16: 2.0**-7, mx.float16: 2.0**-10, mx.float32: 3e-6}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.5}
ROPES: dict[str, Callable[[], Any]] = {
    "plain": lambda: RoPE(32, base=1e4),
    "traditional": lambda: RoPE(32, traditional=True),
    "partial": lambda: RoPE(12),
    "partial traditional": lambda: RoPE(12, traditional=True),
    "linear": lambda: rope_utils.initialize_rope(32, 1e4, False, {"type": "linear", "factor": 2.0}),
    "llama3": lambda: rope_utils.initialize_rope(32, 1e4, False, LLAMA3, 512),
    "yarn": lambda: rope_utils.initialize_rope(32, 1e4, False, YARN, 512),
    "longrope": lambda: rope_utils.SuScaledRoPE(16, long_factor=[1.0 + i for i in range(8)]),
    "proportional": lambda: rope_utils.ProportionalRoPE(32, 16),
}


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)
    mx.random.seed(1)


def native(module: Any, *, fuse: bool = False) -> Any:
    from octavo.engine.executor.native.modules import replace_modules

    class Holder(Module):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.inner = module

    report = replace_modules(Holder(), exact=False, fuse=fuse)
    assert report.replaced, report
    return module


def close(a: mx.array, b: mx.array, tolerance: float) -> bool:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    x, y = (np.array(value.astype(mx.float32)) for value in (a, b))
    return bool((np.abs(x - y) <= tolerance * (np.abs(y) + np.abs(y).max())).all())


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("dtype", list(FLOATS), ids=str)
def test_every_rotation_is_mlx_own(kind: str, dtype: mx.Dtype) -> None:
    wide = ROPES[kind]()
    ours = native(ROPES[kind]())
    cases = (
        ((3, 2, 1, 32), mx.array([0, 7, 300])),  # a step: one row per token
        ((1, 2, 5, 32), 11),  # a prompt in a plain forward
        ((2, 4, 32), mx.array([5, 6])),
    )
    for shape, offset in cases:
        x = mx.random.normal(shape)
        # MLX on the CPU computes angles in the type of x, so the reference takes x in float32.
        truth = wide(x.astype(dtype).astype(mx.float32), offset=offset).astype(dtype)
        assert close(ours(x.astype(dtype), offset=offset), truth, 2 * FLOATS[dtype] + 1e-5)


def test_rotations_read_any_layout_of_their_input() -> None:
    ours = native(RoPE(32))
    offset = mx.array([3, 9, 1, 4, 7])
    x = mx.random.normal((5, 1, 6, 64)).transpose(0, 2, 1, 3)
    for view in (
        x[..., :32],
        x[:, ::2, :, 16:48],
        x[..., ::2],
        mx.broadcast_to(x[:, :1, :, :32], (5, 4, 1, 32)),
    ):
        assert mx.array_equal(ours(view, offset=offset), ours(mx.contiguous(view), offset=offset))
    assert ours(mx.zeros((0, 2, 1, 32)), offset=mx.zeros((0,), mx.int32)).shape == (0, 2, 1, 32)


def test_unsupported_inputs_stay_with_mlx() -> None:
    yarn = rope_utils.initialize_rope(32, 1e4, False, YARN, 512)
    x = mx.random.normal((2, 2, 3, 32))
    backwards = yarn(x, offset=4, inverse=True)
    assert mx.array_equal(native(yarn)(x, offset=4, inverse=True), backwards)
    assert native(RoPE(32))(x[None], offset=3).shape == (1, *x.shape)


def test_a_rotation_does_not_see_a_change_of_its_offsets_in_place() -> None:
    ours = native(RoPE(8))
    x, offset = mx.random.normal((2, 1, 1, 8)), mx.array([1, 2])
    first = ours(x, offset=offset)
    offset += 5
    second = ours(x, offset=offset)
    assert mx.array_equal(first, ours(x, offset=mx.array([1, 2])))
    assert mx.array_equal(second, ours(x, offset=mx.array([6, 7])))


@pytest.mark.parametrize("dtype", list(FLOATS), ids=str)
@pytest.mark.parametrize(("affine", "bias"), [(True, True), (True, False), (False, False)])
def test_layer_norm(dtype: mx.Dtype, affine: bool, bias: bool) -> None:
    for rows, size in ((1, 1), (3, 33), (40, 300)):
        norm = LayerNorm(size, affine=affine, bias=bias)
        norm.update({name: mx.random.normal((size,)).astype(dtype) for name in norm.parameters()})
        x = (mx.random.normal((rows, size)) * 3 + 5).astype(dtype)
        truth = norm(x.astype(mx.float32)).astype(dtype) if affine else norm(x)
        norm.fuse = True
        assert close(native(norm)(x), truth, FLOATS[dtype] + 1e-5)


@pytest.mark.parametrize("dtype", list(FLOATS), ids=str)
@pytest.mark.parametrize("kind", [gemma3_text.RMSNorm, gear.GearRMSNorm, minimax_m3_vl.GemmaRMSNorm])
def test_norms_by_the_weight_plus_one_become_native(kind: Any, dtype: mx.Dtype) -> None:
    from octavo.engine.executor.native.norms import NativeShiftedRMSNorm

    norm = kind(300, eps=1e-4)
    norm.weight = (mx.random.normal((300,)) * 0.3).astype(dtype)
    x = (mx.random.normal((7, 300)) * 3).astype(dtype)
    truth = norm(x.astype(mx.float32)).astype(dtype)
    wide = x.astype(mx.float16) if dtype == mx.float32 else x.astype(mx.float32)
    plain = norm(wide)
    assert type(native(norm)) is NativeShiftedRMSNorm
    assert close(norm(x), truth, 2 * FLOATS[dtype])
    assert close(norm(wide), plain, 2 * FLOATS[dtype]), "what does not fit is the model's own"


def test_norms_whose_source_is_another_are_not_known() -> None:
    from octavo.engine.executor.native.norms import kind_of_norm

    class Plain(gemma3_text.RMSNorm):
        def __call__(self, x: mx.array) -> mx.array:
            return mx.fast.rms_norm(x, self.weight, self.eps)

    class Wrapped(gemma3_text.RMSNorm):
        pass

    @functools.wraps(gemma3_text.RMSNorm.__call__)
    def negative(self: Any, x: mx.array) -> Any:
        return -mx.fast.rms_norm(x, 1.0 + self.weight, self.eps)

    setattr(Wrapped, "__call__", negative)  # noqa: B010
    for other in (Plain(300), Wrapped(300), LayerNorm(300), RMSNorm(300)):
        assert kind_of_norm(other) is None
    two_dimensional = gemma3_text.RMSNorm(300)
    two_dimensional.weight = mx.zeros((3, 100))
    assert kind_of_norm(two_dimensional) is None


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_approx", "gelu_fast_approx"])
@pytest.mark.parametrize("dtype", list(FLOATS), ids=str)
def test_activations(name: str, dtype: mx.Dtype) -> None:
    from octavo.engine.executor.native.activations import replace_activations

    assert name in replace_activations()
    ours = getattr(nn, name)
    x = mx.concatenate([mx.linspace(-30, 30, 9001), mx.array([0.0, -0.0, 6e4, -6e4])]).astype(dtype)
    assert close(ours(x), ours.original(x.astype(mx.float32)).astype(dtype), FLOATS[dtype])
    assert ours(mx.array([1, -2])).dtype == mx.float32  # integers are left to MLX


def test_gated_rows_of_any_layout() -> None:
    both = mx.random.normal((7, 3, 9000))
    for gate, up in (
        (both[..., :4500], both[..., 4500:]),
        (both[::2, :, :100], both[1:5, :, 50:150]),
        (both[:, 1, ::2], both[:, 2, 1::2]),
        (both.transpose(1, 0, 2)[..., :5], both.transpose(1, 0, 2)[..., 5:10]),
    ):
        apart = _ext.gated(mx.contiguous(gate), mx.contiguous(up), "silu")
        assert mx.array_equal(_ext.gated(gate, up, "silu"), apart)
        plain = _ext.rms_norm(both, None, 1e-5)
        assert mx.array_equal(
            _ext.gated(plain[..., :4500], plain[..., 4500:], "gelu"),
            _ext.gated(mx.array(np.array(plain[..., :4500])), mx.array(np.array(plain[..., 4500:])), "gelu"),
        )


@pytest.mark.parametrize("dtype", list(FLOATS), ids=str)
def test_a_norm_takes_over_the_sum_before_it_bit_by_bit(dtype: mx.Dtype) -> None:
    weight, bias = mx.random.normal((300,)).astype(dtype), mx.random.normal((300,)).astype(dtype)
    a, b = (mx.random.normal((40, 300)).astype(dtype) for _ in range(2))
    norms: tuple[Callable[[mx.array, bool], mx.array], ...] = (
        lambda x, fuse: _ext.rms_norm(x, weight, 1e-5, fuse=fuse),
        lambda x, fuse: _ext.layer_norm(x, weight, bias, 1e-5, fuse=fuse),
    )
    for norm in norms:
        total = a + b
        wanted = norm(total, False)
        fused = a + b
        got = norm(fused, True)
        assert mx.array_equal(got, wanted)
        assert mx.array_equal(fused + 1, total + 1)
        row = mx.random.normal((1, 300)).astype(dtype)
        assert mx.array_equal(norm(a + row, True), norm(a + row, False))


@pytest.mark.parametrize("dtype", list(FLOATS), ids=str)
@pytest.mark.parametrize("length", [1, 3])
def test_a_rotation_reads_a_norm_through_views_bit_by_bit(dtype: mx.Dtype, length: int) -> None:
    x = mx.random.normal((4, length, 200)).astype(dtype)
    frequencies = mx.array(1.0 / (1 + np.arange(8, dtype=np.float32)))
    weight = mx.random.normal((20,)).astype(dtype)
    packed = _ext.pack_dense(mx.eye(200).astype(dtype))
    offset = mx.array([2, 3, 5, 70])
    for scale in (1.0, 1.3):
        heads = _ext.linear(x, packed)[..., 20:160].reshape(4, length, 7, 20)
        normed = _ext.rms_norm(heads, weight, 1e-5).transpose(0, 2, 1, 3)
        got = _ext.rope(normed, offset, frequencies, dims=16, value_scale=scale)
        dense = mx.contiguous(normed)
        mx.eval(dense)
        assert mx.array_equal(got, _ext.rope(dense, offset, frequencies, dims=16, value_scale=scale))


def test_angles_are_right_at_large_positions() -> None:
    frequencies = np.float32(1e4) ** -(np.arange(64, dtype=np.float32) / 64)
    x = mx.concatenate([mx.ones((1, 1, 1, 64)), mx.zeros((1, 1, 1, 64))], axis=-1)
    for position in (0, 1, 4095, 131071, 10**6):
        got = np.array(_ext.rope(x, position, mx.array(frequencies), dims=128)).reshape(2, 64)
        angles = (np.float32(position) * frequencies).astype(np.float64)
        assert np.abs(got - [np.cos(angles), np.sin(angles)]).max() < 1e-6


def test_wrong_shapes_are_named() -> None:
    x, frequencies = mx.zeros((2, 3, 1, 8)), mx.zeros((4,))
    with pytest.raises(ValueError, match=r"offset must be .*integers \[2\], got .*int32 \[3\]"):
        _ext.rope(x, mx.array([1, 2, 3]), frequencies, dims=8)
    with pytest.raises(ValueError, match=r"dims must be even and lie in \[2, 8\], got 10"):
        _ext.rope(x, 0, mx.zeros((5,)), dims=10)
    with pytest.raises(ValueError, match=r"inverse_frequencies must be float32 \[4\], got .*\[3\]"):
        _ext.rope(x, 0, mx.zeros((3,)), dims=8)
    with pytest.raises(ValueError, match=r"x must be .*\[B, H, L, D\] or \[B, L, D\], got .*\[8\]"):
        _ext.rope(mx.zeros((8,)), 0, frequencies, dims=8)
    with pytest.raises(ValueError, match=r'activation must be .*, got "relu"'):
        _ext.gated(x, None, "relu")
    with pytest.raises(ValueError, match=r"bias must be .* \[8\]"):
        _ext.layer_norm(x, None, mx.zeros((7,)), 1e-5)


def test_activations_and_norms_do_not_depend_on_neighbours_or_threads() -> None:
    threads = _ext.threads()
    x, weight = mx.random.normal((600, 777)), mx.random.normal((777,))
    heads, offset = mx.random.normal((600, 3, 1, 64)), mx.arange(600)
    frequencies = mx.array(1.0 / (1 + np.arange(32, dtype=np.float32)))
    try:
        for count, rows in itertools.product((1, 3), (1, 37, 600)):
            _ext.set_threads(count)
            ops: tuple[Callable[[mx.array], mx.array], ...] = (
                lambda v: _ext.rms_norm(v, weight, 1e-5),
                lambda v: _ext.layer_norm(v, weight, None, 1e-5),
                lambda v: _ext.gated(v, v * math.pi, "gelu_tanh"),
            )
            for op in ops:
                assert mx.array_equal(op(x[:rows]), op(x)[:rows])
            turned = _ext.rope(heads, offset, frequencies, dims=64)
            part = _ext.rope(heads[-rows:], offset[-rows:], frequencies, dims=64)
            assert mx.array_equal(part, turned[-rows:])
    finally:
        _ext.set_threads(threads)


def _bf16_rows(rng: np.random.Generator, *shape: int) -> mx.array:
    """Includes all magnitudes of bf16, because some CPU conversions turn subnormal results into zero."""
    magnitudes = np.exp2(rng.integers(-135, 4, shape) * (rng.random(shape) < 0.3))
    return mx.array((rng.standard_normal(shape) * magnitudes).astype(np.float32)).astype(mx.bfloat16)


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("size", [32, 64, 96, 100, 128, 256, 1024])
def test_results_in_16_bits_are_rounded_float32_results(size: int, kind: Any) -> None:
    rng = np.random.default_rng(size)
    dtype = mx.bfloat16 if kind is ml_dtypes.bfloat16 else mx.float16
    x, up, weight = (_bf16_rows(rng, *shape).astype(dtype) for shape in ((7, size), (7, size), (size,)))
    wide, wide_up, wide_weight = (a.astype(mx.float32) for a in (x, up, weight))

    def check(got: mx.array, want: mx.array) -> None:
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(
                np.array(got.view(mx.uint16)), np.array(want).astype(kind).view(np.uint16)
            )

    for activation in ("silu", "gelu", "gelu_tanh", "gelu_sigmoid"):
        check(_ext.gated(x, up, activation), _ext.gated(wide, wide_up, activation))
        check(_ext.gated(x, None, activation), _ext.gated(wide, None, activation))
    for eps in (1e-6, 1e30):
        check(_ext.rms_norm(x, weight, eps), _ext.rms_norm(wide, wide_weight, eps))
        check(_ext.rms_norm(x, None, eps), _ext.rms_norm(wide, None, eps))
    if size <= 256 and size % 2 == 0:
        frequencies = mx.array(np.geomspace(1, 1e-4, size // 2).astype(np.float32))
        offsets = mx.array(rng.integers(0, 5_000, 7).astype(np.int32))

        def turned(rows: mx.array) -> mx.array:
            y: mx.array = _ext.rope(rows.reshape(7, 1, 1, size), offsets, frequencies, dims=size)
            return y

        check(turned(x), turned(wide))
