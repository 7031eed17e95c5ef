from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import tiny_adapters
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.executor.adapters.files import MAX_CONFIG_BYTES, read_adapter

LAYER = "model.layers.0.self_attn.q_proj"
CONFIG = {"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 3.0}}
PEFT = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "bias": "none"}
A = mx.array(np.arange(16, dtype=np.float32).reshape(8, 2))
B = mx.array(np.arange(10, dtype=np.float32).reshape(2, 5))


def write(folder: Path, weights: dict[str, mx.array] | None = None, config: Any = CONFIG) -> Path:
    plain = {f"{LAYER}.lora_a": A, f"{LAYER}.lora_b": B}
    tiny_adapters.save(folder, plain if weights is None else weights, config)
    return folder


def write_peft(folder: Path, config: Any = PEFT, **more: mx.array) -> Path:
    name = f"base_model.model.{LAYER}"
    weights = {f"{name}.lora_A.weight": mx.contiguous(A.T), f"{name}.lora_B.weight": mx.contiguous(B.T)}
    tiny_adapters.save(folder, weights | more, config, file="adapter_model.safetensors")
    return folder


def read(folder: Path, max_bytes: int = 1 << 20) -> Any:
    return read_adapter(folder, max_bytes=max_bytes)


def refusal(folder: Path, **how: int) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read(folder, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_both_formats_give_the_same_factors(tmp_path: Path) -> None:
    ours, peft = read(write(tmp_path / "a")), read(write_peft(tmp_path / "b"))
    for factors, scale in ((ours.layers[LAYER], 3.0), (peft.layers[LAYER], 4.0)):
        assert mx.array_equal(factors.a, A.T[None])
        assert mx.array_equal(factors.b, B[None])
        assert factors.scale == scale
        assert factors.magnitude is None
    assert ours.rank == peft.rank == 2
    assert ours.digest != peft.digest


def test_any_change_of_a_file_changes_the_digest(tmp_path: Path) -> None:
    before = read(write(tmp_path / "a")).digest
    assert read(write(tmp_path / "b")).digest == before
    scaled = CONFIG | {"lora_parameters": {"rank": 2, "scale": 3.5}}
    assert read(write(tmp_path / "c", config=scaled)).digest != before
    assert read(write(tmp_path / "d", {f"{LAYER}.lora_a": A + 1, f"{LAYER}.lora_b": B})).digest != before


def test_switch_layers_have_factors_of_each_expert(tmp_path: Path) -> None:
    a, b = mx.random.normal((3, 2, 8)), mx.random.normal((3, 5, 2))
    factors = read(write(tmp_path / "a", {"x.lora_a": a, "x.lora_b": b})).layers["x"]
    assert mx.array_equal(factors.a, a)
    assert mx.array_equal(factors.b, b.swapaxes(1, 2))


@pytest.mark.parametrize("magnitude", ["lora_magnitude_vector", "lora_magnitude_vector.weight"])
def test_magnitudes_of_peft_are_read(tmp_path: Path, magnitude: str) -> None:
    folder = write_peft(tmp_path, **{f"base_model.model.{LAYER}.{magnitude}": mx.arange(5.0)})
    assert mx.array_equal(read(folder).layers[LAYER].magnitude, mx.arange(5.0))


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 4.0),
        ({"use_rslora": True}, 8 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 16}}, 8.0),
        ({"alpha_pattern": {LAYER: 1, "k_proj": 5}}, 0.5),
        ({"alpha_pattern": {"v_proj": 5, f"^{LAYER}": 2, "q_proj": 16}}, 1.0),
        ({"alpha_pattern": {r"self_attn\.q_proj": 16, "^q_proj": 2}}, 8.0),
    ],
)
def test_scales_of_peft(tmp_path: Path, changes: dict[str, Any], scale: float) -> None:
    assert read(write_peft(tmp_path, PEFT | changes)).layers[LAYER].scale == pytest.approx(scale)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bit_factors_are_read_bit_by_bit(tmp_path: Path, dtype: mx.Dtype) -> None:
    a, b = (mx.random.normal(each.shape).astype(dtype) for each in (A, B))
    factors = read(write(tmp_path, {f"{LAYER}.lora_a": a, f"{LAYER}.lora_b": b})).layers[LAYER]
    assert mx.array_equal(factors.a, a.T[None])
    assert mx.array_equal(factors.b, b[None])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type of .* must be lora or dora, got 'full'"),
        ({"fine_tune_type": "lora"}, "scale of .* must be a number below 1e.30, got None"),
        (CONFIG | {"lora_parameters": {"scale": "20"}}, "scale of .* must be a number below 1e.30, got '20'"),
        (
            CONFIG | {"lora_parameters": {"scale": float("inf")}},
            "scale of .* must be a number below 1e.30, got inf",
        ),
        (CONFIG | {"lora_parameters": [1]}, "scale of .* must be a number"),
        ([1, 2], "must be a JSON object, got list"),
    ],
)
def test_configurations_of_mlx_lm_that_are_refused(tmp_path: Path, config: Any, said: str) -> None:
    message = refusal(write(tmp_path, config=config))
    assert re.search(said, message), message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type of .* must be 'LORA', got 'IA3'"),
        ({"bias": "all"}, "bias of .* must be 'none', got 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save of .* got \['lm_head'\]"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out of .* must be False, got True"),
        ({"lora_alpha": None}, "lora_alpha of .* must be a number below 1e.30, got None"),
        ({"lora_alpha": 10**400}, "lora_alpha of .* must be a number below"),
        (
            {"alpha_pattern": {".*q_proj": 3}},
            r"alpha_pattern of .* must have names of layers, got '\.\*q_proj'",
        ),
        ({"init_lora_weights": "pissa"}, "init_lora_weights of .* must be True, got 'pissa'"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens of .* must be None, got \[1\]"),
        ({"alpha_pattern": [1]}, r"alpha_pattern of .* must be a JSON object, got \[1\]"),
    ],
)
def test_configurations_of_peft_that_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    message = refusal(write_peft(tmp_path, PEFT | changes))
    assert re.search(said, message), message


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({}, "must have factors of at least one layer, got none"),
        ({"x.lora_a": A}, r"x in .* must have two matrices A and B, got {'a': \[8, 2\]}"),
        ({"x.lora_a": A, "x.lora_b": mx.zeros((3, 5))}, "x in .* must have factors of one rank"),
        ({"x.lora_a": A, "x.lora_b": B, "x.m": mx.zeros(4)}, "x in .* must have factors of one rank"),
        ({"x.lora_a": A, "x.lora_b": B[None]}, "x in .* must have two matrices A and B"),
        ({"x.lora_a": A * float("nan"), "x.lora_b": B}, "x.lora_a in .* must be finite, got NaN"),
        (
            {"x.lora_a": A.astype(mx.int32), "x.lora_b": B},
            r"must be F32, F16 or BF16 numbers, got I32 \[8, 2\]",
        ),
        (
            {"x.lora_a": A, "x.lora_b": B, "x.bias": B},
            "must have factors of linear layers only, got 'x.bias'",
        ),
        ({"x.lora_A": A, "x.lora_B": B}, "must have factors of linear layers only, got 'x.lora_A'"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, weights: dict[str, mx.array], said: str) -> None:
    message = refusal(write(tmp_path, weights))
    assert re.search(said, message), message


@pytest.mark.parametrize("name", ["x\ny.lora_a", "x" * 300 + ".lora_a"])
def test_names_that_cannot_be_shown_are_refused(tmp_path: Path, name: str) -> None:
    assert len(refusal(write(tmp_path / "a", {name: A}))) < 600


def test_experts_of_peft_become_one_layer(tmp_path: Path) -> None:
    def expert(index: int, rank: int = 2) -> dict[str, mx.array]:
        name = f"base_model.model.m.experts.{index}.w2.lora_"
        return {
            f"{name}A.default.weight": mx.full((rank, 8), 1.0 * index),
            f"{name}B.weight": mx.full((5, rank), -1.0 * index),
        }

    def save(*experts: dict[str, mx.array]) -> Path:
        weights = {name: each for expert in experts for name, each in expert.items()}
        tiny_adapters.save(tmp_path, weights, PEFT, file="adapter_model.safetensors")
        return tmp_path

    (found,) = read(save(*(expert(index) for index in range(11)))).layers.items()
    assert found[0] == "m.switch_mlp.down_proj"
    assert (found[1].a.shape, found[1].b.shape) == ((11, 2, 8), (11, 2, 5))
    assert found[1].a[:, 0, 0].tolist() == (-found[1].b[:, 0, 0]).tolist() == list(range(11))
    for others in (expert(2), expert(1, rank=3)):
        assert "of one rank and scale for every expert" in refusal(save(expert(0), others))


def test_pickles_are_never_read(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "exploded"),)

    (tmp_path / "adapter_config.json").write_text(json.dumps(PEFT))
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "adapter_model.safetensors").write_bytes(pickle.dumps(Bomb()))
    assert "is damaged" in refusal(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    assert ".bin, .pt and .npz files are not read" in refusal(tmp_path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "header", [b"{", b'{"x": 1}', b"\xff" * 9, b'{"x":{"dtype":"F32","shape":[9],"data_offsets":[0,9]}}']
)
def test_damaged_files_are_refused(tmp_path: Path, header: bytes) -> None:
    write(tmp_path)
    (tmp_path / "adapters.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "is damaged" in refusal(tmp_path)
    (tmp_path / "adapters.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + header)
    assert "is damaged" in refusal(tmp_path)


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_configuration_that_is_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    write(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(text)
    assert "must be JSON" in refusal(tmp_path)


def test_files_beyond_the_limits_are_not_read(tmp_path: Path) -> None:
    write(tmp_path)
    assert "must have at most 100 bytes" in refusal(tmp_path, max_bytes=100)
    (tmp_path / "adapter_config.json").write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    assert f"must have at most {MAX_CONFIG_BYTES} bytes" in refusal(tmp_path)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "adapters.safetensors").unlink()
    os.mkfifo(tmp_path / "adapters.safetensors")
    assert "must be a folder with adapters.safetensors" in refusal(tmp_path)
    assert "must be a folder with adapter_config.json" in refusal(tmp_path / "nowhere")
