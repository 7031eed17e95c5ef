"""Reading of config.json files written by any version of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..api.errors import ModelLoadError

_WHOLE_NUMBERS = re.compile(
    r"(num|n)_\w+|\w+_(size|dim|rank|layers?|heads?|experts?|id|positions|embeddings|window|len|length|ctx|inner)"
)
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len")
_SCALED_ALREADY = ("gemma3", "gemma3_text")  # max_position_embeddings already includes the RoPE scaling
_KINDS_BY_LENGTH = ("llama3", "yarn", "longrope")  # RoPE scalings that need the unscaled length
_WINDOWS_IF_ASKED = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_WINDOWS_IN_ALL_LAYERS = (*_WINDOWS_IF_ASKED, "mistral", "mixtral", "phi3", "phimoe", "starcoder2")
_ROPE_BY_LAYER = ("gemma4", "gemma4_text", "laguna", "mellum")
_OWN_OF_ROPE = ("rope_theta", "partial_rotary_factor", "rope_type", "type")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 256},
    "phimoe": {"rms_norm_eps": 1e-5},
    "qwen3_next": {"norm_topk_prob": True},
}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the language model in a config.json."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else dict(config)


def normalized(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the configuration in a uniform form. Raises ModelLoadError."""
    found = {name: _whole(name, value) for name, value in config.items()}
    if isinstance(nested := found.get("text_config"), dict):
        found["text_config"] = normalized(nested, origin)
        if "quantization" in nested:
            found.setdefault("quantization", nested["quantization"])
        return found
    settings = found.get("quantization_config")
    if (
        isinstance(settings, dict)
        and {"group_size", "bits"} <= settings.keys()
        and "quant_method" not in settings
    ):
        found.setdefault("quantization", settings)
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(value := found.get(name) or None, dict | None):
            raise ModelLoadError(f"{name} in {origin} must be an object or null, got {value!r}; correct it")
        if name in found:
            found[name] = value
    _put_rope_at_the_top(found, origin)
    for name, value in _DEFAULTS.get(str(found.get("model_type")), {}).items():
        found.setdefault(name, value)
    return found


def _whole(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(name, one) for one in value]
    is_whole = isinstance(value, float) and value.is_integer() and _WHOLE_NUMBERS.fullmatch(name)
    return int(value) if is_whole else value


def rope_settings(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rotary settings by layer type; "" stands for all layers."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        return {}
    by_layer = {name: value for name, value in given.items() if isinstance(value, dict)}
    found = {}
    for name, value in (by_layer or {"": given}).items():
        kind = value.get("rope_type") or value.get("type") or "default"
        kind = "longrope" if kind == "su" else kind
        settings = {key: config[key] for key in _OWN_OF_ROPE[:2] if config.get(key) is not None}
        settings |= {key: one for key, one in value.items() if one is not None}
        settings |= {"rope_type": kind, "type": kind}
        if kind in _KINDS_BY_LENGTH:
            before = config.get("original_max_position_embeddings")
            settings.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
            if before is not None and not by_layer:
                settings["original_max_position_embeddings"] = before
        if len(settings) > 2 or kind != "default":
            found[name] = settings
    return found


def _put_rope_at_the_top(config: dict[str, Any], origin: str) -> None:
    settings = rope_settings(config)
    if not settings:
        return
    main = settings.get("") or settings.get("full_attention") or next(iter(settings.values()))
    for key in _OWN_OF_ROPE[:2]:
        if key in main and not isinstance(config.get(key), list):
            config[key] = main[key]
    if (theta := settings.get("sliding_attention", {}).get("rope_theta")) is not None:
        config.setdefault("rope_local_base_freq", theta)
    if config.get("model_type") == "gpt_neox":
        for key, name in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")):
            if key in main:
                config[name] = main[key]
    if set(settings) == {""} and config.get("model_type") not in _ROPE_BY_LAYER:
        config.setdefault("rope_parameters", main)
    scaling = {key: value for key, value in main.items() if key not in _OWN_OF_ROPE[:2]}
    if main["rope_type"] != "default" or config.get("rope_scaling"):
        config["rope_scaling"] = scaling
    if main["rope_type"] != "default" and not all(map(_is_number, _numbers(scaling))):
        raise ModelLoadError(f"the rotary scaling in {origin} must have numbers, got {scaling!r}; correct it")


def _numbers(scaling: Mapping[str, Any]) -> Iterator[Any]:
    for name in ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"):
        if name in scaling:
            yield scaling[name]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def sliding_windows(config: Mapping[str, Any]) -> list[int | None]:
    """Return the window of each attention layer; None for full attention."""
    flat = text_config(config)
    window, kinds = flat.get("sliding_window"), flat.get("layer_types")
    if not isinstance(window, int) or isinstance(window, bool) or window <= 0:
        return []
    if isinstance(kinds, list):
        attention = [kind for kind in kinds if kind in ("full_attention", "sliding_attention")]
        return [window if kind == "sliding_attention" else None for kind in attention]
    num_layers = flat.get("num_hidden_layers")
    if not isinstance(num_layers, int) or flat.get("model_type") not in _WINDOWS_IN_ALL_LAYERS:
        return []
    if flat["model_type"] not in _WINDOWS_IF_ASKED:
        return [window] * num_layers
    first = int(flat.get("max_window_layers") or 0) if flat.get("use_sliding_window") else num_layers
    return [None if layer < first else window for layer in range(num_layers)]


def lengths_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the model's default and largest length in positions, if configured.

    Dynamic RoPE scaling does not extend the length, because it would change cached K.
    """
    flat = text_config(config)
    limit = next((flat[key] for key in _LENGTH_KEYS if isinstance(flat.get(key), int)), None)
    settings = rope_settings(flat)
    main = settings.get("") or settings.get("full_attention") or {}
    kind, factor = main.get("rope_type"), main.get("factor")
    if not _is_number(factor):
        return None if limit is None else (limit, limit)
    assert factor is not None
    if kind == "yarn" and _is_number(before := main.get("original_max_position_embeddings")):
        reached = max(limit or 0, int(before * factor))
        return reached, reached
    if kind == "linear" and limit is not None and flat.get("model_type") not in _SCALED_ALREADY:
        return limit, max(limit, int(limit * factor))
    return None if limit is None else (limit, limit)
