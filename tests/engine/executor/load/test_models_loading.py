from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import recurrent_models
import tiny_models
from format_rows import holds
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig, ModelLoadError
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor.load import load_runner
from octavo.engine.executor.load.load import load_paged_runner
from octavo.engine.executor.load.loader import convert_weights, describe_weights, load_model, observe_caches
from octavo.engine.executor.model_ops import ModelOps
from octavo.engine.memory.model_files import read_config
from octavo.engine.memory.planner import plan, render
from octavo.kernels.formats import FORMAT_NAMES, RECIPE, format_pair
from tiny_runners import PAGE_SIZE, PROMPT, load, logprobs_of, make_batch, state

pytestmark = pytest.mark.parity

FITTING = [name for name in FORMAT_NAMES if holds(name, head_dim=16)]


@pytest.mark.parametrize("kv_format", FITTING)
@pytest.mark.few(3)
def test_the_budget_equals_allocation_and_plan(folder: Path, backend: str, kv_format: str) -> None:
    runner = load(folder, backend, kv_format=kv_format)
    info = runner.info
    assert info.memory.pages == sum(pages.nbytes for pages in runner._model.kv_cache.storages)
    row = plan(model=str(folder), memory=10**9, page_size=PAGE_SIZE, observe=observe_caches)["formats"][
        kv_format
    ]
    assert info.memory.pages == 40 * row["bytes_per_page"]
    assert info.memory.weights > 0
    runner.close()
    half = load(
        folder, backend, kv_format=kv_format, num_pages=None, kv_memory=20 * row["bytes_per_page"] + 1
    )
    assert half.info.num_pages == 20
    half.close()


@pytest.mark.parametrize(
    ("architecture", "backend", "expected"),
    [("llama", "cpu", True), ("llama", "reference", False), ("gpt_oss", "cpu", False)],
)
def test_all_native_layers_are_reported_as_batch_invariant(
    tmp_path: Path, architecture: str, backend: str, expected: bool
) -> None:
    runner = load(tiny_models.make_model(tmp_path, architecture), backend)
    assert runner.info.batch_invariant is expected
    runner.close()


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss"])
def test_plan_splits_a_budget_among_groups_as_the_engine_does(tmp_path: Path, architecture: str) -> None:
    path = tiny_models.make_model(tmp_path, architecture)
    fixed = plan(model=str(path), memory=10**9, page_size=PAGE_SIZE, observe=observe_caches)
    result = plan(
        model=str(path),
        memory=fixed["weights_bytes"] + fixed["workspace_bytes"] + 9_000_001,
        page_size=PAGE_SIZE,
        observe=observe_caches,
    )
    assert result["kv_bytes"] == 9_000_001
    row = result["formats"]["fp4"]
    full, window, *residual = row["groups"]
    assert [group["window"] for group in residual] == [PAGE_SIZE + 1] * 2
    assert (full["window"], window["window"]) == (None, tiny_models.WINDOW)
    assert window["pages"] < full["pages"] == row["pages"]
    assert f"2 layers see {tiny_models.WINDOW} positions: 3 separate pages" in render(result)
    runner = load(
        path,
        "cpu",
        kv_format="fp4",
        residual_pages=None,
        num_pages=None,
        kv_memory=9_000_001,
        max_running=64,
        max_step_tokens=512,
    )
    assert runner.info.residual_pages == 2
    assert [group.num_pages for group in runner.info.groups] == [group["pages"] for group in row["groups"]]
    planned = sum(group["pages"] * group["bytes_per_page"] for group in row["groups"])
    assert runner.info.memory.pages == planned
    assert 9_000_001 - full["bytes_per_page"] < planned <= 9_000_001
    runner.close()


def test_latents_have_a_residual_window_as_other_pages_have(tmp_path: Path) -> None:
    path = tiny_models.make_model(tmp_path, "deepseek_v3")
    runner = load(path, "cpu", kv_format="fp4", page_size=PAGE_SIZE, residual_pages=None)
    assert (runner.info.residual_pages, len(runner.info.groups)) == (2, 2)
    runner.close()


def test_state_memory_without_recurrent_layers_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_models.make_model(tmp_path, "llama")
    load(path, "reference", state_memory=2**20).close()
    assert "no layer is recurrent, so state_memory is not used" in caplog.text


def test_a_format_that_cannot_hold_the_rows_is_refused(folder: Path, backend: str) -> None:
    result = plan(model=str(folder), memory=10**9, page_size=PAGE_SIZE, observe=observe_caches)
    assert list(result["formats"]) == [*FITTING, RECIPE]
    assert sorted(result["refused"]) == sorted(set(FORMAT_NAMES) - set(FITTING))
    for name, reason in result["refused"].items():
        assert "head_dim 16" in reason
        with pytest.raises(InvalidConfig, match="head_dim 16"):
            load(folder, backend, kv_format=name)


@pytest.mark.parametrize(
    ("weights", "named"),
    [("bf16", "bf16"), ("int8", "int8"), ("w8a8", "w8a8"), ("int4", "int4"), ("w4a8", "w4a8")],
)
@pytest.mark.few(3)
def test_weights_convert_on_loading(tmp_path: Path, backend: str, weights: str, named: str) -> None:
    folder = tiny_models.make_model(tmp_path, "qwen3", dtype=mx.float32)
    plain, converted = load(folder, backend), load(folder, backend, weights=weights)
    assert plain.info.weights == "fp32"
    assert converted.info.weights == named
    assert converted.info.memory.weights < plain.info.memory.weights * 0.6
    batch = make_batch([(PROMPT, 0, [1, 2])], [10])
    before, after = (runner.run(batch, [state(SamplingParams(logprobs=5))]) for runner in (plain, converted))
    tolerance = {"bf16": 0.3, "int8": 0.5, "w8a8": 0.5, "int4": 8.0, "w4a8": 8.0}[weights]
    assert logprobs_of(after) == pytest.approx(logprobs_of(before), abs=tolerance)
    plain.close()
    converted.close()


def test_quantized_folders_load_and_are_not_quantized_again(
    tmp_path: Path, folder: Path, backend: str
) -> None:
    import json

    quantized = tmp_path / "quantized"
    model = load_model(folder, weights="int8").model
    quantized.mkdir()
    mx.save_safetensors(str(quantized / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = read_config(folder) | {"quantization": {"group_size": 64, "bits": 8}}
    (quantized / "config.json").write_text(json.dumps(config))
    runner = load(quantized, backend)
    assert runner.info.weights == "int8"
    runner.close()
    runner = load(quantized, backend, weights="w8a8")
    assert runner.info.weights == "w8a8"
    runner.close()
    for weights in ("bf16", "int8", "int4"):
        with pytest.raises(InvalidConfig, match="quantized weights; use weights='keep'"):
            load(quantized, backend, weights=weights)


def test_weights_of_four_bits_become_four_by_channels_and_not_eight(tmp_path: Path) -> None:
    model = load_model(tiny_models.make_model(tmp_path, "llama"), weights="int4").model
    with pytest.raises(
        InvalidConfig, match="quantized weights, except from those of 8 bits; use weights='keep'"
    ):
        convert_weights(model, "w8a8", ModelOps())
    convert_weights(model, "w4a8", ModelOps())
    assert describe_weights(model) == "w4a8"


def test_models_that_cannot_be_quantized_are_refused(tmp_path: Path) -> None:
    folder = tiny_models.make_model(
        tmp_path, "llama", hidden_size=48, intermediate_size=96, head_dim=8, num_attention_heads=4
    )
    with pytest.raises(InvalidConfig, match="multiple of 64"):
        load_model(folder, weights="int4")


def test_a_model_that_reads_values_while_it_computes_is_loaded(tmp_path: Path, backend: str) -> None:
    """dbrx reads values on the host to pick experts, so its steps cannot be recorded."""
    folder = tiny_models.make_model(
        tmp_path,
        "dbrx",
        dtype=mx.float32,
        d_model=64,
        n_heads=4,
        n_layers=1,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    )
    runner = load(folder, backend)
    assert runner._model.graph_runner is None
    runner.close()


def test_a_model_whose_own_package_is_missing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """mlx-lm ends the process in this case."""
    if importlib.util.find_spec("hf_olmo") is not None:
        pytest.skip("olmo's package is installed")
    (tmp_path / "config.json").write_text('{"model_type": "olmo"}')
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros(1)})
    with pytest.raises(ModelLoadError, match=r"installed mlx-lm cannot load 'olmo' models: .*ai2-olmo"):
        load_model(tmp_path, weights="keep")
    assert capsys.readouterr().out == ""


def test_failures_to_load_are_one_clear_line(tmp_path: Path, folder: Path) -> None:
    def refused(path: Path, **settings: Any) -> str:
        with pytest.raises(InvalidConfig) as caught:
            load_runner(EngineConfig(model=str(path), backend="reference", **settings))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    import json
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    config = read_config(folder)
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "no_such_type"}))
    assert "no_such_type not supported" in refused(broken)
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    assert "cannot load" in refused(broken)
    (broken / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "cannot load" in refused(broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "bytes long, but has" in refused(broken)
    assert "max_model_len must be at most 1024" in refused(folder, max_model_len=1025)  # linear scaling by 2
    assert "are available; lower kv_memory or num_pages" in refused(folder, num_pages=10**9)
    assert issubclass(ModelLoadError, InvalidConfig)


def test_states_of_recurrent_layers_are_planned_as_the_engine_allocates_them(tmp_path: Path) -> None:
    path = recurrent_models.make_folder(tmp_path, "qwen3_next")
    result = plan(model=str(path), memory=2**26, formats=[format_pair("bf16")], observe=observe_caches)
    row = result["formats"]["bf16"]
    taken = row["state_slots"] * result["state_bytes_per_sequence"] + row["pages"] * row["bytes_per_page"]
    assert 0.99 * result["kv_bytes"] < taken <= result["kv_bytes"]
    assert (result["layers"], result["state_bytes_per_sequence"]) == (1, 58368)
    assert "slots of recurrent state, 57.0 KiB per sequence" in render(result)
    runner = load_paged_runner(
        EngineConfig(model=str(path), kv_memory=result["kv_bytes"], backend="reference")
    )
    assert runner.info.states is not None
    assert runner.info.states.slot_bytes == result["state_bytes_per_sequence"]
    assert runner.info.states.num_slots == row["state_slots"]
    assert runner.info.num_pages == row["pages"]
    assert runner.info.memory.states == row["state_slots"] * result["state_bytes_per_sequence"]


def test_states_that_kernels_keep_wider_stay_within_their_memory(tmp_path: Path) -> None:
    path = recurrent_models.make_folder(tmp_path, "rwkv7", mx.bfloat16)
    runner = load_paged_runner(EngineConfig(model=str(path), state_memory=2**20, backend="cpu", num_pages=9))
    states = runner.info.states
    assert states is not None
    assert states.slot_bytes > observe_caches(path).slot_bytes, "nothing is wider here; use another model"
    assert 0.9 * 2**20 < runner.info.memory.states == states.num_slots * states.slot_bytes <= 2**20
    with pytest.raises(InvalidConfig, match=r"state_memory must hold .*24.8 KiB.*; raise state_memory"):
        load_paged_runner(EngineConfig(model=str(path), state_memory=30_000, backend="cpu", num_pages=9))
