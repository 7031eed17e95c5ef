from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.engine import EngineConfig, InvalidConfig, InvalidRequest, SamplingParams
from octavo.engine.api.setting import settings_of
from octavo.engine.api.structured_output import StructuredOutput

ODD: tuple[Any, ...] = (
    "300MiB", "x", "", 3, 0, -1, 10**30, 2.5, math.nan, math.inf, None, True, b"x", [1], ["a"], ("a", 1), {},
    {"a": 1}, {1: "a"}, np.int64(3), np.float32(0.5), object(),
)  # fmt: skip
KEPT: Mapping[str, type | tuple[type, ...]] = {
    "text": str, "formats": str, "int": int, "size": int, "float": (int, float), "switch": bool, "path": Path,
    "milliseconds": (str, int, float), "names": tuple, "texts": tuple, "pairs": tuple, "ints": tuple,
    "biases": Mapping, "structured": StructuredOutput,
}  # fmt: skip


@pytest.mark.parametrize("value", ODD, ids=lambda value: "object" if type(value) is object else repr(value))
@pytest.mark.parametrize("config", [EngineConfig, SamplingParams])
def test_whatever_is_given_is_refused_or_kept_in_its_type(config: type, value: Any) -> None:
    for name, (declared, _) in settings_of(config).items():
        try:
            kept = getattr(config(**{name: value}), name)
        except (InvalidConfig, InvalidRequest):
            continue
        assert isinstance(kept, KEPT[declared.kind]) or (kept is None and declared.optional), name
        assert declared.kind == "switch" or not isinstance(kept, bool), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_memory": "3 bananas"}, "kv_memory must be bytes .* or a size such as '2GiB', got '3 bananas'"),
        ({"kv_memory": "0"}, "kv_memory must be at least 1, got 0; leave it out"),
        ({"page_size": 16.0}, r"page_size must be a whole number, got 16\.0"),
        ({"page_size": None}, "page_size must be a whole number, got None; leave it out for the default"),
        ({"max_loras": True}, "max_loras must be a whole number, got True"),
        ({"prefix_cache": 1}, "prefix_cache must be True or False, got 1"),
        ({"cache_dir": ""}, "cache_dir must be a path, got ''"),
        (
            {"served_model_name": "x"},
            r"served_model_name must be a tuple of strings, got 'x'; write \('x',\)",
        ),
    ],
)
def test_the_message_names_the_required_type(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^{message}"):
        EngineConfig(**settings)


def test_sizes_parse_like_their_options() -> None:
    settings: dict[str, Any] = {"kv_memory": "300MiB", "swap_memory": "0"}
    config = EngineConfig(**settings)
    assert (config.kv_memory, config.swap_memory) == (300 * 1024**2, 0)


def test_a_path_may_be_text_and_a_tuple_a_list() -> None:
    settings: dict[str, Any] = {"cache_dir": "/somewhere", "served_model_name": ["a", "b"]}
    config = EngineConfig(**settings)
    assert (config.cache_dir, config.served_model_name) == (Path("/somewhere"), ("a", "b"))


def test_parameters_come_from_numpy_and_lists() -> None:
    given: dict[str, Any] = {"max_tokens": np.int64(3), "stop_ids": [1, 2], "logit_bias": {np.int32(4): 1}}
    params = SamplingParams(**given)
    assert (params.max_tokens, params.stop_ids, params.logit_bias) == (3, (1, 2), {4: 1})
    assert type(params.max_tokens) is int
