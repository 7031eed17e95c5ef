from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.containers import Sequential
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from native import at_every_level, require_extension, run_at_level, run_python

_ext = require_extension()

from octavo.engine.executor.native import linear as native  # noqa: E402
from octavo.engine.executor.native.modules import packed_bytes, replace_modules  # noqa: E402

pytestmark = pytest.mark.parity


@at_every_level
def test_every_level_is_linear_of_the_chosen_expert(level: str) -> None:
    assert run_at_level(level, "import expert_checks; expert_checks.main()").strip() == f"checked {level}"


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("num_tokens", [1, 5, 50])
def test_layers_agree_with_mlx_lm(num_tokens: int, bits: int | None) -> None:
    """mlx-lm sorts 64 or more rows by expert; here, 50 tokens with two experts each are 100 rows."""
    mx.random.seed(3)
    layer = SwitchGLU(64, 96, 6, bias=True)
    for name in ("gate_proj", "up_proj", "down_proj"):
        projection: Any = getattr(layer, name)
        projection.bias = mx.random.normal(projection.bias.shape)
        if bits is not None:
            setattr(layer, name, projection.to_quantized(32, bits))
    x, ids = mx.random.normal((2, num_tokens, 64)), mx.random.randint(0, 6, (2, num_tokens, 2))
    expected = layer(x, ids)
    mx.eval(expected)
    report = replace_modules(layer, exact=False, fuse=False)
    assert report.replaced == {"SwitchLinear" if bits is None else "QuantizedSwitchLinear": 3}
    assert not report.kept
    assert float(mx.abs(layer(x, ids) - expected).max() / mx.abs(expected).max()) < 5e-6


def test_an_expert_out_of_range_fails_the_evaluation() -> None:
    # Runs in a new process, because MLX may wait forever for a task that raised.
    code = """
import mlx.core as mx
from octavo.kernels import _ext
experts = _ext.PackedExperts([_ext.pack_dense(mx.zeros((8, 16)))] * 6)
for expert in (6, -1, -(2**31), 2**32):  # the last is 0 in its lower 32 bits
    try:
        mx.eval(_ext.gather_linear(mx.zeros((1, 16)), experts, mx.array(expert, mx.int64)))
    except RuntimeError as error:
        print(error)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"expert (-?\d+) is outside the 6 experts", done.stdout)
    assert found == ["6", "-1", str(-(2**31)), str(2**31 - 1)]


def test_wrong_shapes_are_named() -> None:
    experts = _ext.PackedExperts([_ext.pack_dense(mx.zeros((8, 16)))])
    ids = mx.zeros((2,), mx.int32)
    with pytest.raises(ValueError, match=r"M, 16\] for experts \[8, 16\], got float32 \[2, 1, 15\]"):
        _ext.gather_linear(mx.zeros((2, 1, 15)), experts, ids)
    with pytest.raises(ValueError, match=r"broadcast"):
        _ext.gather_linear(mx.zeros((3, 1, 16)), experts, ids)
    with pytest.raises(ValueError, match="ids must be integers, got float32"):
        _ext.gather_linear(mx.zeros((2, 1, 16)), experts, mx.zeros((2,)))
    with pytest.raises(ValueError, match="must not be empty"):
        _ext.PackedExperts([])
    with pytest.raises(ValueError, match="same shape and format"):
        _ext.PackedExperts([_ext.pack_dense(mx.zeros((8, 16))), _ext.pack_dense(mx.zeros((8, 17)))])


def test_weights_move_and_return() -> None:
    layer = SwitchLinear(64, 48, 3)
    weight, x, ids = layer.weight, mx.random.normal((4, 1, 64)), mx.array([2, 0, 1, 2])
    before = layer(x, ids)
    mx.eval(before)
    report = replace_modules(Sequential(layer), exact=False, fuse=False)
    assert isinstance(layer, native.NativeSwitchLinear)
    assert (layer.input_dims, layer.output_dims, layer.num_experts) == (64, 48, 3)
    assert report.num_bytes == packed_bytes(Sequential(layer)) >= weight.nbytes
    assert mx.array_equal(layer.weight, weight)
    assert mx.allclose(layer(x, ids), before, atol=1e-5)
    quantized: Any = layer.to_quantized(32, 4)
    originals = [quantized.weight, quantized.scales, quantized.biases]
    replace_modules(Sequential(quantized), exact=False, fuse=False)
    assert isinstance(quantized, native.NativeQuantizedSwitchLinear)
    assert (quantized.input_dims, quantized.output_dims, quantized.num_experts) == (64, 48, 3)
    back = [quantized.weight, quantized.scales, quantized.biases]
    assert all(mx.array_equal(a, b) for a, b in zip(originals, back, strict=True))


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_fp4_experts_agree_with_mlx_lm(mode: str) -> None:
    group = 32 if mode == "mxfp4" else 16
    layer = QuantizedSwitchLinear(64, 32, 3, group_size=group, bits=4, mode=mode)
    layer.bias = mx.random.normal((3, 32))
    x, ids = mx.random.normal((4, 1, 64)), mx.array([2, 0, 1, 2])
    expected = layer(x, ids)
    mx.eval(expected)
    assert not replace_modules(Sequential(layer), exact=False, fuse=False).kept
    assert layer.biases is None
    assert float(mx.abs(layer(x, ids) - expected).max() / mx.abs(expected).max()) < 5e-6


def test_formats_without_a_kernel_stay_and_are_reported() -> None:
    quantized = QuantizedSwitchLinear(64, 32, 2, group_size=32, bits=8, mode="mxfp8")
    scaled = QuantizedSwitchLinear(64, 32, 2, group_size=16, bits=4, mode="nvfp4")
    scaled.global_scale = mx.ones((2,))
    report = replace_modules(Sequential(quantized, scaled), exact=False, fuse=False)
    assert sorted((kept.type, kept.reason) for kept in report.kept) == [
        ("QuantizedSwitchLinear", "weights in mxfp8"),
        ("QuantizedSwitchLinear", "weights in nvfp4 with a global scale"),
    ]
