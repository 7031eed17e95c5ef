"""Published configurations of data/published_configs.json, and small models of the same structure.

A small model has fewer layers, tokens, heads and experts. It keeps head dims, groups, ranks, rotary scaling,
windows, softcaps and multipliers, but not YaRN's ``truncate``, which mlx-lm does not read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320
WIDTH = 512
NUM_EXPERTS = 16
NUM_LAYERS = 2
LONGEST_WINDOW = 128  # positions: larger windows would not be filled

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "published_configs.json").read_text()
)
_PATTERNS = {"gemma2": 2, "gemma3_text": 6}  # mlx-lm's default: one in this many layers has full attention
_INNER = re.compile(r"(\w+_)?intermediate_size|block_ff_dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def written_out(value: Any) -> Any:
    """Expand ``{"repeat": [...], "times": n}`` to a list."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"repeat", "times"}:
        return value["repeat"] * value["times"]
    return {name: written_out(one) for name, one in value.items()}


def small(name: str) -> dict[str, Any]:
    """Return a small model's configuration with the special values of a published one."""
    config = dict(CONFIGS[name])
    if isinstance(nested := config.get("text_config"), dict):
        return config | {"text_config": _small(nested), "vocab_size": VOCAB_SIZE}
    return _small(config)


def window_of(config: dict[str, Any]) -> int | None:
    text = config.get("text_config", config)
    types = ("gemma2", "gemma3_text", "gemma3", "gpt_oss", "olmo3", "exaone4", "cohere2")
    return text.get("sliding_window") if text["model_type"] in types else None


def _small(given: dict[str, Any]) -> dict[str, Any]:
    config = {key: value for key, value in given.items() if not re.fullmatch(r"\w*token\w*_ids?", key)}
    num_layers = _num_layers(config)
    kept = {key: written_out(value) for key, value in config.items()}
    for key in ("num_hidden_layers", "n_layer"):
        if key in kept:
            kept[key] = num_layers
    for key, value in kept.items():
        if isinstance(config[key], dict) and isinstance(value, list):
            kept[key] = value[:num_layers]
        elif key == "full_attn_idxs":
            kept[key] = [layer for layer in value if layer < num_layers]
        elif _INNER.fullmatch(key) and value and kept["model_type"] != "mamba":
            kept[key] = min(value, WIDTH)
        elif key in _EXPERTS:
            kept[key] = min(value, max(NUM_EXPERTS, 4 * kept.get("n_group", 1)))
    if isinstance(kept.get("rope_scaling"), dict):
        kept["rope_scaling"].pop("truncate", None)
    return kept | _fewer_heads(kept) | {"vocab_size": VOCAB_SIZE}


def _num_layers(config: dict[str, Any]) -> int:
    """Return the smallest number of layers that includes every kind."""
    found = [NUM_LAYERS, _PATTERNS.get(config["model_type"], 0)]
    found += [
        len(value["repeat"]) for value in config.values() if isinstance(value, dict) and "repeat" in value
    ]
    found += [int(config[key]) for key in ("full_attention_interval",) if config.get(key)]
    pattern = config.get("sliding_window_pattern", 0)
    found.append(pattern if isinstance(pattern, int) else len(pattern))
    found.append(config.get("first_k_dense_replace", 0) + 1)
    found.append(min(config.get("full_attn_idxs", [0])) + 1)
    return max(found)


def _fewer_heads(config: dict[str, Any]) -> dict[str, Any]:
    if "num_attention_heads" not in config or "num_key_value_heads" not in config:
        return {}
    heads, kv_heads, hidden = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "hidden_size")
    )
    fewer = next(
        count for count in range(min(2, kv_heads), kv_heads + 1) if (count * hidden) % (16 * kv_heads) == 0
    )
    changed = {
        "num_attention_heads": heads // kv_heads * fewer,
        "num_key_value_heads": fewer,
        "hidden_size": hidden * fewer // kv_heads,
    }
    for key in ("conv_dim", "conv_dim_out", "block_dim"):
        if key in config:
            changed[key] = changed["hidden_size"]
    if "num_heads" in config:
        changed["num_heads"] = changed["num_attention_heads"]
    if "linear_num_key_heads" in config:
        values = config["linear_num_value_heads"] // config["linear_num_key_heads"]
        changed |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * values}
    return changed
