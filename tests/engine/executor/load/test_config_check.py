from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

import tiny_models
from octavo.engine import LLM, EngineConfig, SamplingParams
from octavo.engine.api.errors import ModelLoadError
from octavo.engine.executor.load import load_runner
from octavo.engine.executor.load.config_check import check_keys, recorded
from octavo.engine.executor.load.loader import load_model, model_classes
from octavo.engine.executor.load.rope_check import match_rope
from octavo.engine.memory.configuration import normalized
from published_models import CONFIGS, written_out


@pytest.mark.parametrize("name", CONFIGS)
def test_published_checkpoints_are_built_with_all_they_say(name: str) -> None:
    config = normalized(written_out(CONFIGS[name]), name)
    with recorded() as readings:
        model_class, arguments = cast("tuple[Any, Any]", model_classes(config))
        model: Any = model_class(arguments.from_dict(config))
    check_keys(config, model, readings, name)
    match_rope(model, config, readings, name)


def changed(tmp_path: Path, kind: str, **changes: Any) -> Path:
    folder = tiny_models.make_model(tmp_path, kind)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
NTK = {"rope_type": "ntk", "factor": 2.0}
BY_LAYER = {
    "full_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_attention": {"rope_theta": 77.0, "rope_type": "linear", "factor": 2.0},
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act in .* must be 'silu', got 'gelu'"),
        ("qwen3_moe", {"rope_scaling": NTK}, "rope_scaling .*'ntk'.* in .* would use RoPE"),
        ("phi3", {"rope_scaling": YARN}, "rope_scaling must contain keys"),
        ("gemma3_text", {"rope_parameters": BY_LAYER}, "rope_scaling of sliding_attention layers .*77.* in "),
        ("gpt_oss", {"swiglu_limit": 3.5}, r"swiglu_limit in .* must be 7\.0, got 3\.5"),
        ("qwen3", {"torch_dtype": "bfloat61"}, "torch_dtype in .* must be one of .*, got 'bfloat61'"),
        ("qwen3", {"is_causal": False}, "is_causal in .* must be True, got False"),
        ("llama", {"use_bidirectional_attention": True}, "use_bidirectional_attention in .* got True"),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "layer_types in .* each of the 4 layers, got 3"),
        ("gpt_oss", {"layer_types": ["sliding_attention", "full_attention"]}, "each of the 4 layers, got 2"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 4}, "layer_types in .* got 'chunked_attention'"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "layer_types in .* got 'sliding_attention'"),
        ("cohere2", {"use_parallel_block": False, "hidden_act": "relu"}, "hidden_act in .* got 'relu'"),
    ],
)
def test_settings_that_mlx_lm_ignores_are_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        load_model(changed(tmp_path, kind, **changes), weights="keep")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {"use_bidirectional_attention": "vision"}),
        ("qwen3", {"is_causal": True, "layer_types": ["sliding_attention"] * 4, "sliding_window": 8}),
        ("qwen3", {"hidden_act": "silu", "note": "ours", "number_of_our_model": 7}),
        ("llama", {"rope_interleaved": True, "attention_dropout": 0.5, "router_aux_loss_coef": 1}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2}),
        ("qwen3", {"id2label": {"0": "LABEL_0"}, "quantization_config": None, "use_cache": False}),
    ],
)
def test_settings_unknown_to_transformers_are_accepted(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    assert load_model(changed(tmp_path, kind, **changes), weights="keep").architecture == kind


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 2.0}, "llama3", "yarn"])
def test_scaling_that_mlx_lm_drops_is_applied(tmp_path: Path, scaling: Any) -> None:
    """mlx-lm reads rope scaling for qwen3, but not for qwen3_moe."""
    scaling = {"llama3": LLAMA3, "yarn": YARN}.get(str(scaling), scaling)
    x = mx.random.normal((1, 1, 3, 16))
    turned = []
    for kind in ("qwen3", "qwen3_moe"):
        model: Any = load_model(changed(tmp_path / kind, kind, rope_scaling=scaling), weights="keep").model
        turned.append(model.layers[-1].self_attn.rope(x, offset=100))
    assert mx.allclose(turned[0], turned[1], atol=1e-4).item()


@pytest.mark.parametrize("kind", ["internlm2", "qwen3", "qwen3_moe"])
def test_dynamic_scaling_is_none_up_to_the_models_length(tmp_path: Path, kind: str) -> None:
    """mlx-lm's module takes a single length for all rows of a step."""
    prompts: list[list[int]] = [[1, 2, 3, 4, 5], [7, 8, 9]]
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=1, ignore_eos=True)
    found = []
    for scaling in (None, DYNAMIC):
        folder = changed(tmp_path / str(scaling is None), kind, rope_scaling=scaling)
        with LLM(EngineConfig(model=str(folder), num_pages=16)) as llm:
            found.append([one.outputs[0].token_ids for one in llm.generate(prompts, params, progress=False)])
    assert found[0] == found[1]


@pytest.mark.parametrize("extra", [{}, {"truncate": False}, {"attention_factor": 1.5}, {"mscale": 2.0}])
def test_yarn_turns_as_transformers_turns_it(tmp_path: Path, extra: dict[str, Any]) -> None:
    folder = changed(tmp_path, "qwen3", rope_scaling=YARN | extra)
    model: Any = load_model(folder, weights="keep").model
    rope = model.layers[0].self_attn.rope

    def pair_that_turns(times: float) -> float:
        return 16 * math.log(128 / (times * 2 * math.pi)) / (2 * math.log(10000))

    low, high = pair_that_turns(32), pair_that_turns(1)
    if extra.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    for pair, period in enumerate(rope._freqs.tolist()):
        plain = 10000 ** (-2 * pair / 16)
        scaled = min(max((pair - max(low, 0)) / (high - max(low, 0)), 0), 1)
        assert 1 / period == pytest.approx(plain / 4 * scaled + plain * (1 - scaled), rel=1e-4)
    assert rope.mscale == pytest.approx(extra.get("attention_factor", 0.1 * math.log(4) + 1))


@pytest.mark.parametrize(("said", "warns"), [("float32", True), ("torch.bfloat16", False), ("auto", False)])
def test_a_dtype_other_than_the_weights_is_reported(
    tmp_path: Path, said: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_model(changed(tmp_path, "qwen3", dtype=said), weights="keep").weights == "bf16"
    told = [one for one in caplog.messages if "dtype is float32, but the weights are bfloat16; they" in one]
    assert len(told) == warns


def test_layer_types_other_than_the_models_own_are_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, "gemma3_text", layer_types=["sliding_attention"] + 3 * ["full_attention"])
    with pytest.raises(ModelLoadError, match="layer_types must be sliding_attention in layer 2"):
        load_runner(EngineConfig(model=str(folder), num_pages=16))


def test_windows_that_mlx_lm_leaves_out_are_kept_by_the_pages(tmp_path: Path) -> None:
    ids = [5, 9, 2, 7, 11, 3, 8, 1]

    def scores(window: int | None, first: int) -> list[float]:
        folder = changed(
            tmp_path / f"{window}-{first}", "qwen2", sliding_window=window, use_sliding_window=True,
            max_window_layers=0,
        )  # fmt: skip
        with LLM(EngineConfig(model=str(folder), num_pages=16, page_size=8)) as llm:
            params = SamplingParams(max_tokens=1, logprobs=5, ignore_eos=True)
            output = llm.generate([[first, *ids]], params, progress=False)[0].outputs[0]
        return [entry.logprob for entry in output.logprobs]

    assert scores(2, 13) == scores(2, 200)
    assert scores(None, 13) != scores(None, 200)
