"""Tiny random models as GGUF files, converted and computed by mlx-lm.

The package ``gguf`` writes the files; Q and K are interleaved as in llama.cpp's conversion."""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten as _tree_flatten
from mlx_lm.utils import load_model

from octavo.engine.api.errors import ModelLoadError
from octavo.engine.gguf import model_folder
from octavo.engine.gguf.convert import AFFINE, affine
from octavo.engine.memory.model_files import resolve_model, served_name

WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB, INNER = 64, 4, 2, 32, 96, 96
TOKENS = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(VOCAB - 3))]
SCALES = {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 5.0}
GRANITE = {
    "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
    "logits_scaling": 5.0, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
NAMES = {  # mlx-lm's name in a layer: GGUF's name
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp", "block_sparse_moe.router.layer": "ffn_gate_inp",
    **{f"{folder}.switch_mlp.{name}_proj": f"ffn_{name}_exps"
       for folder in ("mlp", "block_sparse_moe") for name in ("gate", "up", "down")},
}  # fmt: skip
GEMMA = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
# GGUF architecture: mlx-lm's name, config, GGUF metadata.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": HEAD_DIM}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {"head_dim": HEAD_DIM}, {}),
    "qwen3moe": (
        "qwen3_moe",
        {"head_dim": HEAD_DIM, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
         "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
        EXPERTS,
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM, "sliding_window": 16,
         "sliding_window_pattern": 6},
        {"attention.sliding_window": 16},
    ),
    "phi3": ("phi3", {}, {"attention.sliding_window": 2047}),
    "smollm3": ("smollm3", {"head_dim": HEAD_DIM}, {}),
    "granite": ("granite", GRANITE, SCALES),
    "granitemoe": (
        "granitemoe",
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
        {**SCALES, **EXPERTS},
    ),
}  # fmt: skip
NO_HEAD_DIM = {"qwen2", "phi3", "granite", "granitemoe"}  # mlx-lm takes width / heads
INTERLEAVED = {"llama", "smollm3", "granite", "granitemoe"}


def tree_flatten(tree: Any) -> list[tuple[str, Any]]:
    return list(_tree_flatten(tree))  # type: ignore[arg-type]  # a list without a destination


def num_layers(name: str) -> int:
    return 6 if name == "gemma3" else 2  # one layer of each kind


def random_model(name: str, *, tied: bool) -> Any:
    """Return an mlx-lm model with random weights that float16 holds exactly."""
    model_type, extra, _ = CASES[name]
    config = {
        "model_type": model_type, "hidden_size": WIDTH, "num_hidden_layers": num_layers(name),
        "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5, "vocab_size": VOCAB,
        "rope_theta": 10_000.0, "max_position_embeddings": 256, "tie_word_embeddings": tied, **extra,
    }  # fmt: skip
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    model = module.Model(module.ModelArgs.from_dict(config))
    random = np.random.default_rng(7)
    weights = [
        (key, mx.array(random.normal(0, 0.3, value.shape).astype(np.float16).astype(np.float32)))
        for key, value in tree_flatten(model.parameters())
        if not (tied and key.startswith("lm_head"))
    ]
    model.load_weights(
        list(model.sanitize(dict(weights)).items()) if name == "gemma3" else weights, strict=False
    )
    return model


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(
    path: Path,
    name: str,
    model: Any,
    *,
    tied: bool,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    fields: dict[str, Any] | None = None,
) -> Path:
    """Write a model as llama.cpp's conversion does; fields that are None are left out."""
    head_dim = WIDTH // HEADS if name in NO_HEAD_DIM else HEAD_DIM
    writer = GGUFWriter(path, name)
    facts = {
        "block_count": num_layers(name), "context_length": 256, "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": head_dim,
        "rope.dimension_count": head_dim, "rope.freq_base": 10_000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **CASES[name][2], **(metadata or {}),
    }  # fmt: skip
    for key, value in facts.items():
        add = (
            writer.add_float32
            if isinstance(value, float)
            else writer.add_string
            if isinstance(value, str)
            else writer.add_uint32
        )
        add(f"{name}.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([float(-i) for i in range(VOCAB)])
    writer.add_token_types([2, 3, 3, *[1] * (VOCAB - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (fields or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, GGUFValueType.get_type(value))
    names = {**NAMES, **(GEMMA if name == "gemma3" else {})}
    for key, value in tree_flatten(model.parameters()):
        base, _, kind = key.rpartition(".")
        array = np.array(value)
        if base in OUTSIDE:
            if base == "lm_head" and tied:
                continue
            place = f"{OUTSIDE[base]}.{kind}"
        else:
            _, _, layer, rest = base.split(".", 3)
            place = f"blk.{layer}.{names[rest]}.{kind}"
            if name in INTERLEAVED and rest in ("self_attn.q_proj", "self_attn.k_proj"):
                array = interleaved(array, HEADS if "q_proj" in rest else KV_HEADS)
        if name == "gemma3" and "norm" in base:
            array = array + 1
        if place not in (tensors or {}):
            writer.add_tensor(place, array)
    for place, value in (tensors or {}).items():
        if isinstance(value, tuple):
            writer.add_tensor(place, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(place, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def logits(model: Any) -> np.ndarray:
    return np.array(model(mx.array([[5, 9, 2, 40, 11, 70, 33, 8]])).astype(mx.float32))


@pytest.mark.parity
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("name", CASES)
def test_converted_models_agree_with_their_originals(name: str, tied: bool, tmp_path: Path) -> None:
    if name in ("gemma3",) and not tied:
        pytest.skip("gemma 3 always ties its embeddings")
    model = random_model(name, tied=tied)
    expected = logits(model)
    folder = model_folder(write(tmp_path / "model.gguf", name, model, tied=tied))
    made, _ = load_model(folder)
    made.load_weights([(key, value.astype(mx.float32)) for key, value in tree_flatten(made.parameters())])
    limit = 0.05 if name == "gemma3" else 1e-4  # gemma's weights are rounded to bf16
    assert np.abs(logits(made) - expected).max() <= limit * np.abs(expected).max()


@pytest.mark.parametrize("kind", AFFINE)
def test_blocks_keep_every_value(kind: str) -> None:
    values = np.random.default_rng(3).normal(0, 2, (6, 128)).astype(np.float32)
    blocks = quantize(values, GGMLQuantizationType[kind])
    packed = affine(kind, blocks)
    weight, scales, biases = map(mx.array, packed)
    got = mx.dequantize(weight, scales, biases, group_size=32, bits=AFFINE[kind])
    exact = dequantize(blocks, GGMLQuantizationType[kind])
    # MLX multiplies and adds in float16; codes, scales and biases are exact.
    assert np.abs(np.array(got.astype(mx.float32)) - exact).max() <= 2e-3 * np.abs(exact).max()


def test_quantized_layers_stay_quantized(tmp_path: Path) -> None:
    model = random_model("llama", tied=True)
    weight = np.array(model.model.layers[0].mlp.up_proj.weight)
    kind = GGMLQuantizationType.Q4_1
    file = write(
        tmp_path / "model.gguf", "llama", model, tied=True,
        tensors={"blk.0.ffn_up.weight": (quantize(weight, kind), kind)},
    )  # fmt: skip
    folder = model_folder(file)
    assert json.loads((folder / "config.json").read_text())["quantization"]["bits"] == 4
    made, _ = load_model(folder)
    layer = made.model.layers[0].mlp.up_proj
    assert layer.bits == 4
    assert not hasattr(made.model.layers[1].mlp.up_proj, "bits")


def test_other_formats_are_stored_in_16_bits_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model("llama", tied=True)
    kind = GGMLQuantizationType.TQ2_0
    values = np.random.default_rng(1).normal(size=(WIDTH, 256)).astype(np.float32)
    file = write(
        tmp_path / "model.gguf", "llama", model, tied=True, metadata={"feed_forward_length": 256},
        tensors={"blk.0.ffn_down.weight": (quantize(values, kind), kind)},
    )  # fmt: skip
    model_folder(file)
    assert "MLX has no format like TQ2_0 (1)" in caplog.text


def test_a_file_is_converted_once(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", "llama", random_model("llama", tied=True), tied=True)
    folder = model_folder(file)
    config = folder / "config.json"
    before = config.stat().st_mtime_ns
    assert model_folder(file) == folder
    assert config.stat().st_mtime_ns == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_files_and_folders_of_one_resolve(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny-Q4.gguf", "llama", random_model("llama", tied=True), tied=True)
    assert resolve_model(str(file)) == resolve_model(str(tmp_path)) == model_folder(file)
    assert served_name(str(file)) == "tiny-Q4"


def test_a_file_of_a_repository_is_downloaded_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "tiny.gguf", "llama", random_model("llama", tied=True), tied=True)
    asked: list[tuple[str, str, str | None]] = []

    def download(repository: str, name: str, *, revision: str | None) -> str:
        asked.append((repository, name, revision))
        return str(file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert resolve_model("org/name/sub/tiny.gguf", "v1") == model_folder(file)
    assert asked == [("org/name", "sub/tiny.gguf", "v1")]


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"attention.causal": 0}, "llama.attention.causal = 0"),
        ({"rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor must be 1, got 2"),
        ({"expert_count": 8}, "llama.expert_count = 8"),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type must be none, linear or yarn"),
        ({"rope.dimension_count": 16}, "llama.rope.dimension_count must be the head size 32, got 16"),
    ],
)  # fmt: skip
def test_settings_without_a_counterpart_are_refused(
    metadata: dict[str, Any], text: str, tmp_path: Path
) -> None:
    file = write(
        tmp_path / "model.gguf", "llama", random_model("llama", tied=True), tied=True, metadata=metadata
    )
    with pytest.raises(ModelLoadError, match=text):
        model_folder(file)
    assert list((tmp_path / "cache" / "octavo" / "gguf").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("granite", {"granite.rope.scaling.finetuned": False}, "finetuned must be true, got false"),
        ("llama", {"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ("llama", {"tokenizer.ggml.model": "gpt2"}, "no tokenizer.ggml.merges"),
        ("llama", {"tokenizer.ggml.token_type": [1]}, "cannot be converted"),
        ("llama", {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["q z"]}, "cannot be converted"),
        ("llama", {"llama.attention.head_count": 0}, "cannot be converted"),
    ],
)  # fmt: skip
def test_files_with_broken_metadata_are_refused_in_one_line(
    name: str, fields: dict[str, Any], text: str, tmp_path: Path
) -> None:
    model = random_model(name, tied=True)
    file = write(tmp_path / "model.gguf", name, model, tied=True, fields=fields)
    with pytest.raises(ModelLoadError, match=rf"^.*{text}.*\Z"):
        model_folder(file)


def test_files_of_the_other_byte_order_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = functools.partial(GGUFWriter, endianess=GGUFEndian.BIG)
    monkeypatch.setattr(f"{__name__}.GGUFWriter", big)
    file = write(tmp_path / "model.gguf", "llama", random_model("llama", tied=True), tied=True)
    with pytest.raises(ModelLoadError, match="must be little-endian like this machine"):
        model_folder(file)


def test_unknown_tensors_are_refused_by_name(tmp_path: Path) -> None:
    extra = np.zeros((4, 4), np.float32)
    file = write(
        tmp_path / "model.gguf",
        "llama",
        random_model("llama", tied=True),
        tied=True,
        tensors={"blk.0.ffn_gate_inp.weight": extra},
    )
    with pytest.raises(ModelLoadError, match=r"tensor 'blk\.0\.ffn_gate_inp\.weight' has no counterpart"):
        model_folder(file)


def test_unknown_architectures_are_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"architecture must be one of .*, got 'mamba'"):
        model_folder(tmp_path / "model.gguf")


@pytest.mark.parametrize("length", [0, 3, 20, 400, 2000])
def test_truncated_files_are_refused(length: int, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", "llama", random_model("llama", tied=True), tied=True)
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ModelLoadError, match="GGUF file"):
        model_folder(file)


def test_two_files_in_a_folder_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"must hold one GGUF file, got a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))


def test_llama3_scaling_is_found_in_its_divisors(tmp_path: Path) -> None:
    model = random_model("llama", tied=True)
    wavelengths = 2 * np.pi * 10_000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    divisors = np.ones(HEAD_DIM // 2)
    for index, length in enumerate(wavelengths):  # transformers' formula, one frequency at a time
        if length > 8192 / 1.0:
            divisors[index] = 8.0
        elif length > 8192 / 4.0:
            smooth = (8192 / length - 1.0) / (4.0 - 1.0)
            divisors[index] = 1 / ((1 - smooth) / 8.0 + smooth)
    file = write(
        tmp_path / "model.gguf",
        "llama",
        model,
        tied=True,
        tensors={"rope_freqs.weight": divisors.astype(np.float32)},
    )
    config = json.loads((model_folder(file) / "config.json").read_text())
    assert config["rope_scaling"] == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    divisors = np.linspace(1, 3, HEAD_DIM // 2).astype(np.float32)
    model = random_model("llama", tied=True)
    file = write(tmp_path / "model.gguf", "llama", model, tied=True, tensors={"rope_freqs.weight": divisors})
    with pytest.raises(ModelLoadError, match="must be Llama 3's frequency divisors"):
        model_folder(file)
