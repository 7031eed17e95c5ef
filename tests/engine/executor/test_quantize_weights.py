from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

import tiny_models
from native import require_extension
from octavo.engine.api.config import Weights
from octavo.engine.executor import model_ops
from octavo.engine.executor.load.loader import convert_weights, describe_weights, load_model
from octavo.engine.executor.model_ops import ModelOps
from octavo.engine.executor.native.model_ops import NativeOps
from octavo.kernels import channel_weights

pytestmark = pytest.mark.parity

_ext = require_extension()


def parameters(model: Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
def test_weights_quantized_while_loading_are_those_of_mlx(
    tmp_path: Path, architecture: str, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    kernel = _ext.quantize_weights

    def counted(w: mx.array, *, group_size: int, bits: int) -> tuple[mx.array, mx.array, mx.array]:
        called.append(bits)
        arrays: tuple[mx.array, mx.array, mx.array] = kernel(w, group_size=group_size, bits=bits)
        return arrays

    monkeypatch.setattr(_ext, "quantize_weights", counted)
    folder = tiny_models.make_model(tmp_path / "model", architecture)
    ours, theirs = (load_model(folder, weights=weights, ops=ops).model for ops in (NativeOps(), ModelOps()))
    wanted = parameters(theirs)
    assert any(name.endswith("scales") for name in wanted)
    got = parameters(ours)
    assert got.keys() == wanted.keys()
    assert all(mx.array_equal(got[name], wanted[name]) for name in wanted)
    assert int(weights.removeprefix("int")) in called
    assert len(called) >= sum(name.endswith("scales") for name in wanted)


@pytest.mark.parametrize("weights", ["w8a8", "w4a8"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
def test_weights_by_channels_are_those_of_their_definition(
    tmp_path: Path, architecture: str, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_models.make_model(tmp_path / "model", architecture)
    theirs = load_model(folder, weights=weights, ops=ModelOps()).model
    affine = load_model(folder, weights="int8" if weights == "w8a8" else "int4", ops=ModelOps()).model
    again = load_model(folder, weights="int8" if weights == "w8a8" else "int4", ops=NativeOps()).model
    convert_weights(affine, weights, ModelOps())
    wanted, wanted_again = parameters(theirs), parameters(affine)
    mx.eval(wanted, wanted_again)
    for module in (channel_weights, model_ops):
        monkeypatch.delattr(module, "quantize_as")
    monkeypatch.setattr(channel_weights, "QUANTIZE", {})
    ours = load_model(folder, weights=weights, ops=NativeOps()).model
    convert_weights(again, weights, NativeOps())
    for model, expected in ((ours, wanted), (again, wanted_again)):
        got = parameters(model)
        assert describe_weights(model) == weights
        assert any(name.endswith("scales") and got[name].ndim == 3 for name in got) == (
            architecture == "qwen3_moe"
        )
        assert got.keys() == expected.keys()
        assert all(mx.array_equal(got[name], expected[name]) for name in expected)


SHAPES = [(1, 128), (70, 256), (2, 3, 384)]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_quantized_weights_are_those_of_mlx_to_the_bit(dtype: mx.Dtype, group_size: int, bits: int) -> None:
    special = [
        mx.zeros((1, 256)),
        mx.full((1, 256), -3.0),
        mx.arange(256)[None] - 255.0,
        mx.arange(256)[None],
    ]
    weights = [mx.random.normal(shape) * size for shape in SHAPES for size in (1e-4, 0.02, 1, 500)]
    for weight in [*weights, mx.concatenate(special)]:
        w = weight.astype(dtype)
        wanted = mx.quantize(w, group_size, bits)
        got = _ext.quantize_weights(w, group_size=group_size, bits=bits)
        assert all(mx.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(got, wanted, strict=True))
    strided = mx.random.normal((256, 48)).astype(dtype).T
    got = _ext.quantize_weights(strided, group_size=group_size, bits=bits)
    assert all(map(mx.array_equal, got, mx.quantize(mx.contiguous(strided), group_size, bits)))


def test_weights_that_cannot_be_quantized_are_named() -> None:
    weight = mx.zeros((4, 128))
    for settings, message in (
        ({"group_size": 64, "bits": 3}, "bits must be 4 or 8, got 3"),
        ({"group_size": 16, "bits": 4}, "group_size must be 32, 64 or 128, got 16"),
    ):
        with pytest.raises(ValueError, match=message):
            _ext.quantize_weights(weight, **settings)
    for wrong in (mx.zeros((4, 96)), mx.zeros((64,)), mx.zeros((4, 128), mx.int32), mx.zeros((0, 128))):
        with pytest.raises(ValueError, match="whole groups of 64, got"):
            _ext.quantize_weights(wrong, group_size=64, bits=4)
