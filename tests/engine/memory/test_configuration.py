from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.api.errors import InvalidConfig, ModelLoadError
from octavo.engine.memory.configuration import lengths_of, normalized, sliding_windows
from octavo.engine.memory.model_files import model_length

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1024}


def test_counts_written_as_floats_are_whole_numbers() -> None:
    given = {"num_hidden_layers": 4.0, "vocab_size": 32.0, "eos_token_id": [2.0], "rms_norm_eps": 1.0}
    found = normalized(given, "config.json")
    assert found == given
    assert [type(value) for value in found.values()] == [int, int, list, float]
    assert type(found["eos_token_id"][0]) is int


@pytest.mark.parametrize(
    ("config", "theta", "scaling"),
    [
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, 5e5, LLAMA3),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, LLAMA3),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1.0}}, 5e5, LLAMA3),
        (
            {
                "rope_theta": 1e4,
                "max_position_embeddings": 2048,
                "rope_scaling": {"type": "yarn", "factor": 2},
            },
            1e4,
            {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 2048},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "su"}, "original_max_position_embeddings": 64},
            1e4,
            {"rope_type": "longrope", "original_max_position_embeddings": 64},
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                }
            },
            1e6,
            {"rope_type": "linear", "factor": 8.0},
        ),
    ],
)
def test_rotary_settings_stand_at_the_top(
    config: dict[str, Any], theta: float, scaling: dict[str, Any] | None
) -> None:
    found = normalized(config, "config.json")
    assert found["rope_theta"] == theta
    got = found.get("rope_scaling")
    assert got == (scaling if scaling is None else {**scaling, "type": scaling["rope_type"]})


def test_windowed_layers_keep_their_own_base() -> None:
    bases = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    assert normalized({"rope_parameters": bases}, "config.json")["rope_local_base_freq"] == 1e4


def test_transformers_defaults_come_before_other_ones() -> None:
    assert normalized({"model_type": "phimoe"}, "config.json")["rms_norm_eps"] == 1e-5
    assert normalized({"model_type": "phimoe", "rms_norm_eps": 1e-6}, "x")["rms_norm_eps"] == 1e-6
    nested = normalized({"model_type": "x", "text_config": {"model_type": "gemma2"}}, "config.json")
    assert nested["text_config"]["query_pre_attn_scalar"] == 256


def test_quantization_of_mlx_is_found_under_other_names() -> None:
    settings = {"group_size": 64, "bits": 4}
    assert normalized({"quantization_config": settings}, "config.json")["quantization"] == settings
    assert "quantization" not in normalized({"quantization_config": settings | {"quant_method": "awq"}}, "x")
    nested = {"text_config": {"quantization": settings}}
    assert normalized(nested, "config.json")["quantization"] == settings


def test_no_scaling_may_be_false_and_no_other_value() -> None:
    assert normalized({"rope_scaling": False}, "config.json") == {"rope_scaling": None}
    with pytest.raises(
        ModelLoadError, match=r"rope_scaling in config\.json must be an object or null, got True"
    ):
        normalized({"rope_scaling": True}, "config.json")


def test_scaling_that_is_no_number_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"rotary scaling in config\.json must have numbers"):
        normalized(
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": "four"}}, "config.json"
        )


@pytest.mark.parametrize(
    ("scaling", "default", "most"),
    [
        (None, 2048, 2048),
        (YARN, 8192, 8192),  # as model cards say to enable it
        (YARN | {"original_max_position_embeddings": 1024}, 4096, 4096),
        (YARN | {"original_max_position_embeddings": 256}, 2048, 2048),
        (LLAMA3, 2048, 2048),
        ({"rope_type": "longrope", "factor": 8.0}, 2048, 2048),
        ({"type": "linear", "factor": 2.0}, 2048, 4096),
        ({"type": "dynamic", "factor": 4.0}, 2048, 2048),
        ({"rope_type": "default", "factor": 4.0}, 2048, 2048),
    ],
)
def test_how_long_sequences_may_be(scaling: dict[str, Any] | None, default: int, most: int) -> None:
    config = {"model_type": "qwen3", "max_position_embeddings": 2048, "rope_theta": 1e4}
    config |= {} if scaling is None else {"rope_scaling": scaling}
    assert lengths_of(config) == (default, most)
    assert model_length(config, None) == default
    assert model_length(config, most) == most
    with pytest.raises(InvalidConfig, match=f"must be at most {most}, for which the model was trained"):
        model_length(config, most + 1)


def test_gemma_counts_scaled_positions() -> None:
    config = {
        "model_type": "gemma3_text",
        "max_position_embeddings": 128,
        "rope_scaling": {"type": "linear", "factor": 8.0},
    }
    assert lengths_of(config) == (128, 128)
    assert lengths_of({"model_type": "x"}) is None


QWEN = {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 2}
LAYERS = ["conv", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, [8, 8, 8, 8]),
        ({"model_type": "mistral", "sliding_window": None}, []),
        (QWEN | {"use_sliding_window": False}, [None, None, None, None]),
        (QWEN | {"use_sliding_window": True}, [None, None, 8, 8]),
        ({"model_type": "other", "sliding_window": 8}, []),
        ({"model_type": "other", "sliding_window": 8, "layer_types": LAYERS}, [8, None]),
    ],
)
def test_windows_that_a_configuration_asks_for(config: dict[str, Any], windows: list[int | None]) -> None:
    assert sliding_windows({"num_hidden_layers": 4, **config}) == windows
