from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

import tiny_adapters
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig, ModelLoadError
from octavo.engine.executor.load.loader import observe_caches
from octavo.engine.frontend.llm import LLM
from octavo.engine.memory import planner as plan
from octavo.engine.memory.draft_memory import ObservedCaches
from octavo.engine.memory.model_files import model_length, read_config, resolve_model
from octavo.kernels.formats import FormatPair
from octavo.kernels.interface import LayerSpec


def folder(path: Path, **config: Any) -> Path:
    text = json.dumps({"x": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(2))
    (path / "config.json").write_text(json.dumps(config))
    return path


QWEN: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 1024, "vocab_size": 151936, "intermediate_size": 3072,
    "max_position_embeddings": 40960,
}  # fmt: skip


def planned(path: Path, *, head_dim: int = 128, memory: int = 4 * 1024**3, **settings: Any) -> dict[str, Any]:
    layer = LayerSpec(num_kv_heads=8, head_dim=head_dim, value_dim=head_dim)
    caches = ObservedCaches((layer,) * 28)
    return plan.plan(model=str(path), memory=memory, observe=lambda _: caches, **settings)


def test_a_plan_of_qwen3_06b(tmp_path: Path) -> None:
    result = planned(folder(tmp_path, **QWEN), context=4096)
    assert result["weights_bytes"] == 2
    rows = result["formats"]
    assert rows["bf16"]["bytes_per_token"] == 28 * 2 * 8 * 128 * 2
    assert rows["bf16"]["bytes_per_page"] == 32 * rows["bf16"]["bytes_per_token"]
    assert rows["fp4"]["bytes_per_token"] == 28 * 2 * 8 * 66
    for row in rows.values():
        residual = sum(
            group["pages"] * group["bytes_per_page"] for group in row["groups"] if group["residual"]
        )
        assert row["pages"] == (result["kv_bytes"] - residual) // row["bytes_per_page"]
        assert row["tokens"] == row["pages"] * 32
        assert row["sequences"] == row["pages"] // 128
    assert result["memory_bytes"] == result["weights_bytes"] + result["workspace_bytes"] + result["kv_bytes"]
    json.dumps(result)
    table = plan.render(result)
    assert "112 KiB" in table
    assert "sequences of 4096" in table


def test_memory_of_adapters_is_taken_from_pages(tmp_path: Path) -> None:
    path = folder(tmp_path, **QWEN)
    plain = planned(path)
    result = planned(path, adapters={"lora_memory": 1 << 28, "max_loras": 3})
    assert result["kv_bytes"] == plain["kv_bytes"] - (1 << 28)
    assert "adapters 256 MiB (up to 3 in a step" in plan.render(result)
    assert "in a step" not in plan.render(plain)


def test_the_plan_knows_the_bytes_of_an_adapter(tmp_path: Path) -> None:
    model = resolve_model("demo")
    tiny_adapters.make_adapter(tmp_path / "tale", model, rank=4)
    with LLM(EngineConfig(num_pages=64, lora_modules=(f"tale={tmp_path / 'tale'}",))) as llm:
        (adapter,) = llm.info.adapters
    each = plan.plan(model="demo", memory=1 << 30, observe=observe_caches)["adapter_bytes_per_rank"]
    assert adapter.nbytes == 4 * each


def test_k_and_v_may_be_planned_apart(tmp_path: Path) -> None:
    result = planned(folder(tmp_path, **QWEN), formats=[FormatPair("int8", "fp4")])
    assert list(result["formats"]) == ["int8/fp4"]
    assert result["formats"]["int8/fp4"]["bytes_per_token"] == 28 * 8 * (130 + 66)
    assert "int8/fp4" in plan.render(result)


def test_a_bounded_cache_needs_the_same_pages_however_long_the_sequence(tmp_path: Path) -> None:
    path = folder(tmp_path, **QWEN)
    plans = [
        planned(path, context=context, max_kv_size=1020)
        for context in (4096, 100_000)  # the second is longer than the model supports
    ]
    short, long = (result["formats"]["fp4"] for result in plans)
    assert short == long
    group, residual = long["groups"]
    assert (residual["residual"], residual["pages_per_sequence"]) == (True, 1 + 2)
    assert (group["window"], group["keep"]) == (1016, 4)
    assert group["pages_per_sequence"] == 1 + 33  # a window of 1,016 positions may touch 33 pages of 32
    assert "28 layers see the first 4 positions and the last 1016: 34 separate pages" in plan.render(plans[1])
    with pytest.raises(InvalidConfig, match="max_kv_size must be at most 40960"):
        planned(path, max_kv_size=50_000)


def test_formats_that_cannot_hold_the_rows_are_named(tmp_path: Path) -> None:
    result = planned(folder(tmp_path, **QWEN), head_dim=80)
    assert sorted(result["refused"]) == ["affine4", "affine8", "mxfp4"]
    assert "affine4 packs rows of a multiple of 64 values, got head_dim 80" in plan.render(result)


def test_a_model_that_does_not_fit_is_reported(tmp_path: Path) -> None:
    result = planned(folder(tmp_path, **QWEN), memory=1000)
    assert not result["fits"]
    assert "no memory is left for pages" in plan.render(result)


def test_a_context_beyond_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"context must be at most 40960.* got 50000"):
        planned(folder(tmp_path, **QWEN), memory=1, context=50000)
    assert model_length(QWEN, 100) == 100
    assert model_length({"model_type": "x"}, None) == 4096


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    def refused(name: object) -> str:
        with pytest.raises(ModelLoadError) as caught:
            resolve_model(str(name))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "does not exist" in refused(tmp_path / "nowhere" / "deeper")
    assert "does not exist" in refused("no-such-model")
    file = tmp_path / "file"
    file.write_text("")
    assert "neither a folder nor a GGUF file" in refused(file)
    assert "config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in refused(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "model_type" in refused(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "no model*.safetensors" in refused(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    assert "damaged" in refused(tmp_path)


def test_demo_is_the_embedded_model_wherever_one_is() -> None:
    assert read_config(resolve_model("demo"))["model_type"] == "qwen3"


def test_a_hub_id_without_a_network_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)
    with pytest.raises(ModelLoadError, match="Hugging Face cannot be reached"):
        resolve_model("org/name")


def test_an_unresponsive_hub_falls_back_to_the_cached_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The socket accepts connections, but nothing answers."""
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
        with pytest.raises(ModelLoadError, match="Hugging Face cannot be reached"):
            resolve_model("org/silent")
        kept = tmp_path / "models--org--silent"
        (kept / "refs").mkdir(parents=True)
        (kept / "refs" / "main").write_text("aa")
        shutil.copytree(resolve_model("demo"), kept / "snapshots" / "aa")
        assert resolve_model("org/silent") == kept / "snapshots" / "aa"
    assert caplog.messages == ["org/silent: Hugging Face does not answer; the cached snapshot aa is used"]


def test_latents_are_compared_with_dense_keys_and_values(tmp_path: Path) -> None:
    """DeepSeek-V3: 576 values instead of 128 heads with 192 + 128 values."""
    config = {
        **QWEN, "model_type": "deepseek_v3", "num_attention_heads": 128, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    latent = LayerSpec(num_kv_heads=1, head_dim=512, value_dim=64)
    dense = LayerSpec(num_kv_heads=128, head_dim=192, value_dim=128)
    model = str(folder(tmp_path, **config))

    def plan_of(layer: LayerSpec) -> dict[str, Any]:
        return plan.plan(
            model=model, memory=2**34, context=4096, observe=lambda _: ObservedCaches((layer,) * 61)
        )

    result = plan_of(latent)
    assert result["latents"] == {
        "layers": 61,
        "bytes_per_token": 61 * 2 * 576,
        "dense_bytes_per_token": 61 * 2 * 128 * (192 + 128),
    }
    assert result["formats"]["bf16"]["bytes_per_token"] == result["latents"]["bytes_per_token"]
    assert "61 layers cache latents: 68.6 KiB per token" in plan.render(result)
    assert "71.1 times as much" in plan.render(result)
    assert plan_of(dense)["latents"] is None
    assert "cache latents" not in plan.render(plan_of(dense))
