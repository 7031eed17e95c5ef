from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_lm_alone
import tiny_models
from native import require_extension
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import ModelLoadError
from octavo.engine.executor.adapt import sparse_latents
from octavo.engine.executor.adapt.cache_adapter import LayerCache
from octavo.engine.executor.load.load import load_paged_runner
from octavo.engine.executor.load.loader import load_model, materialize
from octavo.engine.executor.recurrent.recurrent_layers import RecurrentLayers
from octavo.kernels.cpu import recurrent
from octavo_lab.architectures.configurations import configuration

_ext = require_extension()

from octavo.engine.executor.native import linear, norms, rope  # noqa: E402
from octavo.engine.executor.native.comparison import Comparison  # noqa: E402
from octavo.engine.executor.native.model_ops import NativeOps  # noqa: E402

Patch = pytest.MonkeyPatch

NEMOTRON = {
    "hidden_size": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_proj_bias": True,
    "ssm_state_size": 16,
    "conv_kernel": 3,
    "n_groups": 4,
    "time_step_limit": [1.0, 2.0],
    "attention_bias": False,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-4,
    "use_bias": True,
    "use_conv_bias": True,
    "hybrid_override_pattern": ["*", "M", "-", "M"],
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7}


def materialized(folder: Path, architecture: str, *, weights: Any = "keep", **config: Any) -> None:
    path = tiny_models.make_model(folder, architecture, **config)
    ops = NativeOps()
    model = load_model(path, weights=weights, ops=ops).model
    materialize(model, ops, exact=False, fuse=True)


def calls(kind: Any, call: Callable[..., mx.array]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(kind, "__call__", call)


def rotates(**changes: Any) -> Callable[[Patch], None]:
    plain = rope.rotation_of

    def changed(module: Any) -> rope.Rotation:
        rotation = plain(module)
        given = {key: value(rotation) if callable(value) else value for key, value in changes.items()}
        return dataclasses.replace(rotation, **given)

    return lambda patch: patch.setattr(rope, "rotation_of", changed)


def multiplies(change: Callable[[Any, mx.array], mx.array]) -> Callable[[Patch], None]:
    def patched(patch: Patch) -> None:
        plain = linear._Packed.multiply
        patch.setattr(linear._Packed, "multiply", lambda self, x, *more: change(self, plain(self, x, *more)))

    return patched


def activates(kind: str) -> Callable[[Patch], None]:
    plain = _ext.gated

    def gated(gate: mx.array, up: mx.array | None, activation: str) -> Any:
        return plain(gate, up, kind if activation == "silu" else activation)

    return lambda patch: patch.setattr(_ext, "gated", gated)


def one_group(self: Any, x: mx.array, gate: mx.array) -> Any:
    return _ext.rms_norm(_ext.gated(gate, x, "silu"), self["weight"], self.eps)


def gate_last(self: Any, x: mx.array, gate: mx.array) -> Any:
    groups = mx.unflatten(x, -1, (-1, self.norm_group_size))
    return self["weight"] * _ext.gated(gate, _ext.rms_norm(groups, None, self.eps).flatten(-2), "silu")


def eps_outside(self: Any, x: mx.array) -> Any:
    wide = x.astype(mx.float32)
    rms = mx.sqrt(mx.mean(wide * wide, axis=-1, keepdims=True))
    return (wide / (rms + self.eps) * self["weight"]).astype(x.dtype)


def other_eps(self: Any, x: mx.array) -> Any:
    return mx.fast.rms_norm(x, self["weight"], 2 * self.eps)


def without_one(self: Any, x: mx.array) -> Any:
    return _ext.rms_norm(x, self["weight"], self.eps)


def without_mean(self: Any, x: mx.array) -> Any:
    return _ext.rms_norm(x, self["weight"], self.eps) + self.get("bias", 0)


def without_bias(self: Any, y: mx.array) -> Any:
    return y - self["bias"] if "bias" in self else y


def wrong_if_many(self: Any, y: mx.array) -> Any:  # noqa: ARG001
    return y * 1.1 if y.size // y.shape[-1] > 32 else y


def clipped(patch: Patch) -> None:
    plain = _ext.gated
    patch.setattr(_ext, "gated", lambda gate, up, kind: plain(mx.minimum(gate, 30), up, kind))


def heads_swapped(_: Any, y: mx.array) -> Any:
    return mx.flatten(mx.unflatten(y, -1, (-1, 2, 16))[..., ::-1, :], -3, -1) if y.shape[-1] == 64 else y


def next_expert(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> Any:  # noqa: ARG001
    if self.packed is None:
        self.pack()
    return _ext.gather_linear(x, self.packed, (indices + 1) % self.num_experts, exact=self.exact)


def next_row(self: Any, ids: mx.array) -> Any:
    return _ext.select_rows(self["weight"], mx.maximum(ids - 1, 0))


def longer_period(rotation: rope.Rotation) -> Any:
    return rotation.inverse_frequencies * 0.98


MISTAKES: dict[str, tuple[str, dict[str, Any], Callable[[Patch], None], str]] = {
    "group size": (
        "nemotron_h",
        NEMOTRON,
        calls(norms.NativeGatedRMSNorm, one_group),
        r"layers\.1\.mixer\.norm",
    ),
    "gate order": (
        "nemotron_h",
        NEMOTRON,
        calls(norms.NativeGatedRMSNorm, gate_last),
        r"layers\.1\.mixer\.norm",
    ),
    "eps placement": ("llama", {}, calls(norms.NativeRMSNorm, eps_outside), r"layers\.0\.input_layernorm"),
    "eps": ("llama", {}, calls(norms.NativeRMSNorm, other_eps), r"layers\.0\.input_layernorm"),
    "norm's plus one": ("gemma3_text", {}, calls(norms.NativeShiftedRMSNorm, without_one), r"\.q_norm"),
    "mean": ("cohere2", {}, calls(norms.NativeLayerNorm, without_mean), r"layers\.0\.input_layernorm"),
    "rope base": ("llama", {}, rotates(inverse_frequencies=longer_period), r"layers\.0\.self_attn\.rope"),
    "rope scaling": ("llama", {}, rotates(position_scale=1.0), r"layers\.0\.self_attn\.rope"),
    "rope scale": ("qwen3", {"rope_scaling": YARN}, rotates(value_scale=1.0), r"layers\.0\.self_attn\.rope"),
    "rope pairs": ("llama", {}, rotates(interleaved=True), r"layers\.0\.self_attn\.rope"),
    "rope dims": ("phi3", {}, rotates(dims=4), r"self_attn\.rope"),
    "head order": ("llama", {}, multiplies(heads_swapped), r"layers\.0\.self_attn\.o_proj"),
    "bias": ("qwen2", {}, multiplies(without_bias), r"self_attn\.[qkv]_proj"),
    "scale": ("llama", {}, multiplies(lambda _, y: y * 1.02), r"lm_head|_proj"),
    "many rows": ("llama", {}, multiplies(wrong_if_many), r"lm_head|_proj"),
    "expert": ("qwen3_moe", {}, calls(linear.NativeSwitchLinear, next_expert), r"switch_mlp\.\w+_proj"),
    "row of a table": ("llama", {}, calls(linear.NativeEmbedding, next_row), r"embed_tokens"),
    "activation": ("llama", {}, activates("gelu"), r"function (silu|\w*swiglu)"),
    "large values": ("llama", {}, clipped, r"function \w*(silu|gelu|swiglu)"),
    "approximation": ("llama", {}, activates("gelu_sigmoid"), r"function (silu|\w*swiglu)"),
}
"""(architecture, configuration, planted mistake, text of the message)."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_native_layer_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: Patch, mistake: str
) -> None:
    architecture, config, plant, named = MISTAKES[mistake]
    plant(monkeypatch)
    with pytest.raises(ModelLoadError, match=rf"native .*{named}.* (must compute|fails) "):
        materialized(tmp_path, architecture, **config)


FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@pytest.mark.parametrize("architecture", sorted({name for name, *_ in MISTAKES.values()}))
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(each, marks=() if each == mx.bfloat16 else pytest.mark.slow) for each in FLOATS],
    ids=str,
)
def test_native_layers_that_are_right_are_not_refused(
    tmp_path: Path, architecture: str, dtype: mx.Dtype
) -> None:
    materialized(tmp_path, architecture, dtype=dtype, **(NEMOTRON if architecture == "nemotron_h" else {}))


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        ("int8", mx.bfloat16),
        ("int4", mx.float16),
        ("w8a8", mx.float16),
        ("w4a8", mx.bfloat16),
        pytest.param("int8", mx.float16, marks=pytest.mark.slow),
        pytest.param("int4", mx.bfloat16, marks=pytest.mark.slow),
        pytest.param("w8a8", mx.bfloat16, marks=pytest.mark.slow),
        pytest.param("w4a8", mx.float16, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_product_of_quantized_weights_is_refused(
    tmp_path: Path, monkeypatch: Patch, weights: str, dtype: mx.Dtype
) -> None:
    """Inputs are integers that fit in 8 bits, so rounding activations to 8 bits loses nothing."""
    materialized(tmp_path / "right", "llama", weights=weights, dtype=dtype)
    multiplies(lambda _, y: y * 1.02)(monkeypatch)
    with pytest.raises(
        ModelLoadError, match=r"native layer .*(_proj|lm_head) \(QuantizedLinear\) must compute"
    ):
        materialized(tmp_path / "wrong", "llama", weights=weights)


def without_softcap(patch: Patch) -> None:
    attend = LayerCache.attend

    def uncapped(shim: LayerCache, queries: mx.array, *, scale: float, **options: Any) -> mx.array:
        return attend(shim, queries, scale=scale, **options | {"softcap": None})

    patch.setattr(LayerCache, "attend", uncapped)


@pytest.mark.parametrize(
    ("architecture", "config", "plant"),
    [
        ("nemotron_h", NEMOTRON, calls(norms.NativeGatedRMSNorm, one_group)),
        ("gemma3_text", {}, calls(norms.NativeShiftedRMSNorm, without_one)),
        ("llama", {}, rotates(position_scale=1.0)),
        ("llama", {}, activates("gelu")),
        ("qwen2", {}, multiplies(without_bias)),
        ("gemma2", {}, without_softcap),
    ],
    ids=["group size", "plus one", "rope scaling", "activation", "bias", "softcap"],
)
@pytest.mark.few(3)
def test_the_probe_compares_with_the_model_as_it_was_before(
    tmp_path: Path,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
    architecture: str,
    config: dict[str, Any],
    plant: Any,
) -> None:
    path = tiny_models.make_model(tmp_path, architecture, dtype=mx.float32, **config)
    settings = EngineConfig(model=str(path), backend="cpu", num_pages=8)
    monkeypatch.setattr(Comparison, "check", lambda _: None)
    load_paged_runner(settings).close()
    plant(monkeypatch)
    try:
        with caplog.at_level("INFO"):
            load_paged_runner(settings).close()
        refusal = caplog.text
    except ModelLoadError as error:
        refusal = str(error)
    assert "paged cache" in refusal
    assert "logits of" in refusal


def computes(place: Any, name: str, other: Callable[..., Any]) -> Callable[[Patch], None]:
    def patched(patch: Patch) -> None:
        plain = getattr(place, name)
        patch.setattr(place, name, lambda *args, **named: other(plain, *args, **named))

    return patched


def kernel(name: str, change: Callable[[list[mx.array], list[float]], None]) -> Callable[[Patch], None]:
    def call(plain: Any, given: str, pool: Any, step: Any, inputs: Any, options: Any) -> Any:
        inputs, options = list(inputs), list(options)
        if given == name:
            change(inputs, options)
        return plain(given, pool, step, inputs, options)

    return computes(recurrent, "recurrence", call)


def given(index: int, other: Callable[[mx.array], mx.array]) -> Callable[[list[mx.array], Any], None]:
    def change(inputs: list[mx.array], _: Any) -> None:
        inputs[index] = other(inputs[index])

    return change


def option(index: int, other: Callable[[float], float]) -> Callable[[Any, list[float]], None]:
    def change(_: Any, options: list[float]) -> None:
        options[index] = other(options[index])

    return change


def swapped(first: int) -> Callable[[list[mx.array], Any], None]:
    def change(inputs: list[mx.array], _: Any) -> None:
        inputs[first], inputs[first + 1] = inputs[first + 1], inputs[first]

    return change


def more_scale(plain: Any, *args: Any, scale: float, **named: Any) -> Any:
    return plain(*args, scale=scale * 1.05, **named)


KERNELS: dict[str, tuple[str, Callable[[Patch], None], str]] = {
    "taps": ("lfm2", kernel("causal_conv", given(1, lambda x: x[::-1])), r"layers\.\d\.conv\.conv0"),
    "step's bias": ("mamba2", kernel("ssd", given(5, lambda x: x + 0.3)), r"mixer\.ssm_update"),
    "step's limit": ("mamba2", kernel("ssd", option(1, lambda _: 0.5)), r"mixer\.ssm_update"),
    "skip": ("nemotron_h", kernel("ssd", given(6, lambda x: 0.9 * x)), r"mixer\.ssm_update"),
    "beta": (
        "qwen3_next", kernel("gated_delta", option(2, lambda x: 0.95 * x)),
        r"linear_attn\.gated_delta_update",
    ),
    "heads": (
        "qwen3_next", kernel("gated_delta", given(1, lambda x: x[:, ::-1])),
        r"linear_attn\.gated_delta_update",
    ),
    "B and C": ("mamba", kernel("selective_scan", swapped(2)), r"mixer\.selective_scan"),
    "scale": (
        "bailing_moe_linear", kernel("lightning", option(0, lambda x: 1.05 * x)), r"attention\.recurrent",
    ),
    "K and V": ("bailing_moe_linear", kernel("lightning", swapped(1)), r"attention\.recurrent"),
    "gates": ("recurrent_gemma", kernel("rg_lru", swapped(1)), r"temporal_block\.child0"),
    "b": ("rwkv7", kernel("wkv7", given(-1, lambda x: 0.9 * x)), r"attn\._wkv7"),
}  # fmt: skip
"""(architecture, planted mistake, layer), for kernels of recurrent layers."""


def load_random(folder: Path, architecture: str, dtype: mx.Dtype = mx.float32) -> None:
    config = configuration(architecture)
    mlx_lm_alone.save(mlx_lm_alone.make_model(config, dtype, 0), config, folder)
    tiny_models.make_tokenizer(folder)
    load_paged_runner(EngineConfig(model=str(folder), backend="cpu", num_pages=8)).close()


@pytest.mark.parametrize("mistake", KERNELS)
@pytest.mark.few(3)
def test_a_wrong_recurrent_kernel_is_refused_by_its_layer(
    tmp_path: Path, monkeypatch: Patch, mistake: str
) -> None:
    architecture, plant, layer = KERNELS[mistake]
    plant(monkeypatch)
    with pytest.raises(ModelLoadError, match=rf"native layer .*{layer}\w* must compute what mlx-lm's does"):
        load_random(tmp_path, architecture)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    list(zip(sorted({name for name, *_ in KERNELS.values()}), itertools.cycle(FLOATS), strict=False)),
)
@pytest.mark.few(3)
def test_recurrent_kernels_that_are_right_are_not_refused(
    tmp_path: Path, monkeypatch: Patch, architecture: str, dtype: mx.Dtype
) -> None:
    plain, compared = RecurrentLayers.wrong_kernel, []

    def counted(layers: RecurrentLayers) -> str | None:
        compared.append(len(layers.compared or {}))
        return plain(layers)

    monkeypatch.setattr(RecurrentLayers, "wrong_kernel", counted)
    load_random(tmp_path, architecture, dtype)
    assert min(compared) >= 2


def weaker(plain: Any, shim: LayerCache, queries: mx.array, **options: Any) -> Any:
    return plain(shim, queries, **options | {"rotary": options["rotary"] * 0.9})


@pytest.mark.parametrize("plant", [more_scale, weaker], ids=["scale", "rotary"])
def test_wrong_attention_over_latents_is_refused_by_its_cache(
    tmp_path: Path, monkeypatch: Patch, plant: Any
) -> None:
    computes(LayerCache, "attend", plant)(monkeypatch)
    with pytest.raises(ModelLoadError, match=r"attention over latents \(cache 0\) has error"):
        load_random(tmp_path, "deepseek_v3")


@pytest.mark.parametrize(
    "plant",
    [
        lambda plain, scores, positions, count: plain(-scores, positions, count),
        lambda plain, scores, positions, count: plain(scores, positions, count - 1),
    ],
    ids=["worst", "fewer"],
)
def test_a_wrong_choice_of_positions_is_refused(tmp_path: Path, monkeypatch: Patch, plant: Any) -> None:
    computes(sparse_latents, "best_positions", plant)(monkeypatch)
    with pytest.raises(ModelLoadError, match=r"'deepseek_v32' computes different results with a paged cache"):
        load_random(tmp_path, "deepseek_v32")
