from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.containers import Sequential
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.models import activations, llama, qwen3

from native import at_every_level, at_levels, available_levels, require_extension, run_at_level

_ext = require_extension()

from octavo.engine.executor.native import linear as native  # noqa: E402
from octavo.engine.executor.native.modules import packed_bytes, replace_modules  # noqa: E402

pytestmark = pytest.mark.parity

MODELS = {"qwen3": qwen3, "llama": llama}


@at_every_level
def test_every_level_agrees_with_float64(level: str) -> None:
    assert run_at_level(level, "import linear_checks; linear_checks.main()").strip() == f"checked {level}"


@at_levels("avx512")
def test_avx2_agrees_bit_for_bit_on_shared_code(level: str) -> None:
    code = "import linear_checks; linear_checks.print_integer_digest()"
    assert run_at_level("avx2", code) == run_at_level(level, code)


def test_fixed_point_is_the_documented_formula() -> None:
    """AVX2 is checked because every x86-64 CPU with a faster level also runs it."""
    if "avx2" not in available_levels():
        pytest.skip("this CPU does not run avx2")
    assert run_at_level("avx2", "import linear_fixed_checks; linear_fixed_checks.main()").strip() == "checked"


def test_strided_and_empty_inputs() -> None:
    weight = mx.random.normal((48, 64)).astype(mx.bfloat16)
    packed = _ext.pack_dense(weight.T.astype(mx.bfloat16).T)
    wide = mx.random.normal((6, 128)).astype(mx.bfloat16)
    for x in (wide[:, ::2], wide[::2, 64:], mx.broadcast_to(wide[:1, :64], (3, 64))):
        assert mx.array_equal(_ext.linear(x, packed), _ext.linear(mx.contiguous(x), packed))
    residual = mx.random.normal((48, 3)).astype(mx.bfloat16)
    x = wide[:3, :64]
    assert mx.array_equal(
        _ext.linear(x, packed, residual=residual.T),
        _ext.linear(mx.contiguous(x), packed, residual=mx.contiguous(residual.T)),
    )
    assert _ext.linear(mx.zeros((0, 64), mx.bfloat16), packed).shape == (0, 48)
    assert _ext.linear(mx.zeros((2, 0, 64), mx.bfloat16), packed).shape == (2, 0, 48)
    assert _ext.linear(wide[0, :64], packed).shape == (48,)
    assert _ext.take_rows(packed, mx.zeros((0,), mx.int32)).shape == (0, 64)
    assert _ext.rms_norm(mx.zeros((0, 8)), None, 1e-5).shape == (0, 8)
    strided = mx.random.normal((5, 6, 4)).swapaxes(0, 1)
    assert mx.array_equal(
        _ext.rms_norm(strided, None, 1e-5), _ext.rms_norm(mx.contiguous(strided), None, 1e-5)
    )


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("shape", [(7, 32), (130, 64), (65, 256)])
def test_unpack_restores_every_bit(shape: tuple[int, int], dtype: mx.Dtype) -> None:
    weight = mx.random.normal(shape).astype(dtype)
    assert mx.array_equal(_ext.unpack(_ext.pack_dense(weight))[0], weight)
    odd = weight[:, :-1]
    assert mx.array_equal(_ext.unpack(_ext.pack_dense(odd))[0], odd)
    for bits in native.AFFINE_BITS:
        arrays = mx.quantize(weight, 32, bits)
        back = _ext.unpack(_ext.pack_affine(*arrays, group_size=32, bits=bits))
        assert all(mx.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(arrays, back, strict=True))
    for mode in native.FP4_MODES:
        arrays = mx.quantize(weight, mode=mode)
        back = _ext.unpack(_ext.pack_fp4(*arrays, mode=mode))
        assert all(mx.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(arrays, back, strict=True))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("outputs", [(1, 1), (63, 1, 2), (130, 64, 65), (64, 128), (5, 200)])
def test_weights_packed_as_one_are_one_below_the_other(outputs: tuple[int, ...], dtype: mx.Dtype) -> None:
    for inputs in (32, 33, 100):
        weights = [mx.random.normal((count, inputs)).astype(dtype) for count in outputs]
        bias = mx.random.normal((sum(outputs),))
        x = mx.random.normal((3, inputs)).astype(dtype)
        whole = mx.concatenate(weights)
        packed = _ext.pack_stacked([weights[0], *[weight.T.astype(dtype).T for weight in weights[1:]]], bias)
        assert mx.array_equal(_ext.unpack(packed)[0], whole)
        assert mx.array_equal(_ext.linear(x, packed), _ext.linear(x, _ext.pack_dense(whole, bias)))


def test_weights_that_do_not_stack_are_named() -> None:
    with pytest.raises(ValueError, match="at least one weight"):
        _ext.pack_stacked([])
    with pytest.raises(ValueError, match=r"same inputs and type.*\[8, 16\] and .*\[8, 15\]"):
        _ext.pack_stacked([mx.zeros((8, 16)), mx.zeros((8, 15))])
    with pytest.raises(ValueError, match=r"same inputs and type.*float32.*float16"):
        _ext.pack_stacked([mx.zeros((8, 16)), mx.zeros((8, 16), mx.float16)])
    with pytest.raises(ValueError, match=r"neither of them 0, got float32 \[0, 16\]"):
        _ext.pack_stacked([mx.zeros((8, 16)), mx.zeros((0, 16))])


def test_wrong_shapes_are_named() -> None:
    packed = _ext.pack_dense(mx.zeros((8, 16)))
    codes, scales, biases = mx.quantize(mx.zeros((8, 64)), 32, 4)
    with pytest.raises(ValueError, match=r"\[\.\.\., 16\] for a weight \[8, 16\], got float32 \[2, 15\]"):
        _ext.linear(mx.zeros((2, 15)), packed)
    with pytest.raises(ValueError, match=r"residual must be .* got .*\[2, 7\]"):
        _ext.linear(mx.zeros((2, 16)), packed, residual=mx.zeros((2, 7)))
    with pytest.raises(ValueError, match=r"x must be bfloat16, float16 or float32 .* got int32"):
        _ext.linear(mx.zeros((2, 16), mx.int32), packed)
    with pytest.raises(ValueError, match=r"weight must be .* got float32 \[8\]"):
        _ext.pack_dense(mx.zeros((8,)))
    with pytest.raises(ValueError, match=r"bias must have shape \[8\].* got \[9\]"):
        _ext.pack_dense(mx.zeros((8, 16)), mx.zeros((9,)))
    with pytest.raises(ValueError, match="bits must be 1 to 6 or 8, got 7"):
        _ext.pack_affine(codes, scales, biases, group_size=32, bits=7)
    with pytest.raises(ValueError, match=r"\[8, 8\] are not whole groups of 32 codes of 3 bits"):
        _ext.pack_affine(codes, scales, biases, group_size=32, bits=3)
    with pytest.raises(ValueError, match="mode must be mxfp4 or nvfp4, got mxfp8"):
        _ext.pack_fp4(codes, scales, mode="mxfp8")
    with pytest.raises(ValueError, match="scales of mxfp4 must be uint8, got float32"):
        _ext.pack_fp4(codes, scales, mode="mxfp4")
    with pytest.raises(ValueError, match="group_size must be 32, 64 or 128, got 16"):
        _ext.pack_affine(codes, scales, biases, group_size=16, bits=4)
    with pytest.raises(ValueError, match=r"scales must have shape .*\[8, 1\] .* got \[8, 2\]"):
        _ext.pack_affine(codes, scales, biases, group_size=64, bits=4)
    with pytest.raises(ValueError, match=r"weight must be .* \[16\]"):
        _ext.rms_norm(mx.zeros((2, 16)), mx.zeros((15,)), 1e-5)
    with pytest.raises(ValueError, match="up must have the shape and type of gate"):
        _ext.gated(mx.zeros((2, 16)), mx.zeros((2, 15)), "silu")


def failure(make: Callable[[], mx.array]) -> str:
    """Evaluate in a new thread, because MLX may wait forever on the main thread after a failed task."""
    with ThreadPoolExecutor(1) as thread:
        return str(thread.submit(lambda: mx.eval(make())).exception())


def test_a_row_outside_the_table_fails_the_evaluation() -> None:
    packed = _ext.pack_dense(mx.zeros((8, 16)))
    assert "row 8 is outside the 8 rows" in failure(lambda: _ext.take_rows(packed, mx.array([8])))
    big = "row 2147483647 is outside the 8 rows"
    assert big in failure(lambda: _ext.take_rows(packed, mx.array([2**32], mx.int64)))
    assert big in failure(lambda: _ext.take_rows(packed, mx.array([2**32], mx.uint64)))
    small = failure(lambda: _ext.take_rows(packed, mx.array([-(2**32)], mx.int64)))
    assert "row -2147483648 is outside the 8 rows" in small


def test_several_streams_at_once() -> None:
    """Each Python thread has a separate MLX stream; all streams share the thread pool."""
    rng = np.random.default_rng(4)
    packed = _ext.pack_dense(mx.array(rng.standard_normal((256, 128))).astype(mx.bfloat16))
    rows = rng.standard_normal((40, 128)).astype(np.float32)
    expected = np.array(_ext.linear(mx.array(rows), packed))
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(50):
            result = _ext.linear(mx.array(rows), packed, stream=mx.new_stream(mx.cpu))
            if not np.array_equal(np.array(result), expected):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def tiny_model(
    name: str, *, tied: bool, dtype: mx.Dtype, bits: int | None = None, mode: str = "affine"
) -> Module:
    module = MODELS[name]
    mx.random.seed(5)
    model: Module = module.Model(
        module.ModelArgs(
            model_type=name,
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=160,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            rms_norm_eps=1e-6,
            vocab_size=300,
            rope_theta=1e4,
            tie_word_embeddings=tied,
            max_position_embeddings=512,
        )
    )
    model.set_dtype(dtype)
    if bits is not None:
        quantize(model, 16 if mode == "nvfp4" else 32, bits, mode=mode)
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("bits", "mode"),
    [(None, "affine"), (8, "affine"), (4, "affine"), (3, "affine"), (4, "mxfp4"), (4, "nvfp4")],
)
@pytest.mark.parametrize(("name", "tied"), [("qwen3", False), ("llama", True)])
@pytest.mark.few(5)
def test_models_agree_with_mlx(
    name: str, tied: bool, bits: int | None, mode: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (activations, *MODELS.values()):
        monkeypatch.setattr(module, "swiglu", getattr(activations.swiglu, "original", activations.swiglu))
    ids = mx.array([[3, 5, 7, 299, 1, 2, 0, 8]])
    # MLX's quantized product sums in bf16, so the reference is float32.
    for dtype, tolerance in ((mx.float32, 5e-6), (mx.bfloat16, 0.06)):
        model = tiny_model(name, tied=tied, dtype=dtype, bits=bits, mode=mode)
        expected = model(ids).astype(mx.float32)
        mx.eval(expected)
        report = replace_modules(model, exact=exact, fuse=True)
        logits = model(ids).astype(mx.float32)
        assert float(mx.abs(logits - expected).max() / mx.abs(expected).max()) < tolerance
        kind = "Linear" if bits is None else "QuantizedLinear"
        assert report.replaced[kind] == 14 + (not tied)
        assert report.replaced["RMSNorm"] == (9 if name == "qwen3" else 5)
        assert not report.kept
        assert "swiglu" in report.functions


def test_weights_move_and_return() -> None:
    layer = Linear(64, 48)
    weight, x = layer.weight, mx.random.normal((3, 64))
    before = layer(x)
    mx.eval(before)
    report = replace_modules(Sequential(layer), exact=False, fuse=False)
    assert isinstance(layer, native.NativeLinear)
    assert isinstance(layer, Linear)
    assert list(dict(tree_flatten(layer.parameters()))) == ["bias"]  # type: ignore[no-untyped-call]
    assert mx.array_equal(layer.weight, weight)
    assert mx.allclose(layer(x), before, atol=1e-5)
    assert report.num_bytes == packed_bytes(Sequential(layer)) >= weight.nbytes
    layer.weight = weight * 2
    assert mx.allclose(layer(x) - layer.bias, 2 * (before - layer.bias), atol=1e-5)
    quantized = layer.to_quantized(32, 4)
    codes, scales = quantized.weight, quantized.scales
    replace_modules(Sequential(quantized), exact=False, fuse=False)
    quantized(x)
    assert mx.array_equal(quantized.weight, codes)
    assert mx.array_equal(quantized.scales, scales)
    micro = Linear(64, 48).to_quantized(mode="mxfp4")
    codes = micro.weight
    replace_modules(Sequential(micro), exact=False, fuse=False)
    assert micro.biases is None
    assert mx.array_equal(micro.weight, codes)


def test_an_embedding_is_packed_when_its_head_is_used() -> None:
    table = Embedding(100, 64)
    rows, ids = table.weight, mx.array([[1, 99], [0, 5]])
    replace_modules(Sequential(table), exact=False, fuse=False)
    assert mx.array_equal(table(ids), rows[ids])
    assert packed_bytes(Sequential(table)) == 0
    assert table.as_linear(mx.ones((2, 64))).shape == (2, 100)
    assert packed_bytes(Sequential(table)) > 0
    assert "weight" not in table
    assert mx.array_equal(table(ids), rows[ids])


class Doubled(Linear):
    def __call__(self, x: mx.array) -> mx.array:
        doubled: mx.array = 2 * super().__call__(x)
        return doubled


def test_unknown_layers_stay_and_are_reported() -> None:
    class Model(Module):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.double = Doubled(32, 32)
            self.norm = LayerNorm(32)
            self.three = Linear(64, 32).to_quantized(64, 3)
            self.micro = Linear(64, 32).to_quantized(32, 4, mode="mxfp4")
            self.wide = Linear(64, 32).to_quantized(32, 8, mode="mxfp8")
            self.plain = Linear(32, 32)

    report = replace_modules(Model(), exact=False, fuse=False)
    assert report.replaced == {"Linear": 1, "QuantizedLinear": 2, "LayerNorm": 1}
    assert {kept.name: (kept.type, kept.reason) for kept in report.kept} == {
        "double": ("Doubled", "no native kernel for this type"),
        "wide": ("QuantizedLinear", "weights in mxfp8"),
    }
