from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from octavo.engine import EngineConfig, InvalidConfig
from octavo.engine.api.setting import settings_of


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "cuda"}, "backend must be one of auto, metal, cpu, reference, got 'cuda'"),
        ({"weights": "int3"}, "weights must be one of"),
        ({"kv_format": "fp3"}, "kv_format must be one of .*, got 'fp3'"),
        ({"kv_format": "fp4/fp3"}, "or two, written K/V, got 'fp4/fp3'"),
        ({"tenant_weights": "a=2"}, "tenant_weights must be left out if schedule_policy is fcfs, got a=2"),
        ({"threads": 0}, "threads must be at least 1, got 0; leave it out"),
        ({"kv_memory": -1}, "kv_memory must be at least 1, got -1"),
        ({"num_pages": 0}, "num_pages must be at least 1"),
        ({"max_model_len": 0}, "max_model_len must be at least 1"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"page_size": 24}, "page_size must be a power of two up to 1024, got 24"),
        ({"page_size": 2048}, "page_size must be a power of two"),
        ({"max_running": 0}, "max_running must be at least 1"),
        ({"max_waiting": 0}, "max_waiting must be at least 1"),
        (
            {"schedule_policy": "vtc", "tenant_weights": "alice=1e-320"},
            "tenant_weights must be at least 1e-12 each, got .*; raise it",
        ),
        ({"kv_memory": 1, "num_pages": 1}, "kv_memory and num_pages both set the size of the pool"),
        (
            {"max_running": 64, "max_step_tokens": 63},
            r"max_step_tokens \(63\) must be at least max_running \(64\)",
        ),
    ],
)
def test_the_message_names_value_rule_and_remedy(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message) as caught:
        EngineConfig(**settings)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", settings_of(EngineConfig))
def test_every_declared_rule_is_checked(name: str) -> None:
    declared, _ = settings_of(EngineConfig)[name]
    wrong: list[object] = ["none of them"] * bool(declared.choices)
    if declared.low is not None:
        wrong.append(declared.low if declared.above else declared.low - 1)
    if declared.high is not None:
        wrong.append(declared.high + 1)
    for value in wrong:
        with pytest.raises(InvalidConfig, match=f"^{name} must be .*, got {value!r}"):
            EngineConfig(**{name: value})  # type: ignore[arg-type]


NEEDY = {
    "max_pinned_pages": 1, "cache_dir": Path("x"), "cache_dir_bytes": 10 * 1024**3, "swap_memory": 1,
    "remote_cache": "redis://x", "max_image_pixels": 1,
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NEEDY.items())
def test_settings_that_need_another_are_refused_alone(name: str, value: object) -> None:
    needed = settings_of(EngineConfig)[name][0].needs
    assert needed is not None
    rest = {"prefix_cache": False} if needed == "prefix_cache" else {}
    message = re.escape(f"{name} must be left out without {needed}, got {value}; set {needed}, too")
    with pytest.raises(InvalidConfig, match=f"^{message}$"):
        EngineConfig(**{name: value}, **rest)  # type: ignore[arg-type]


def test_only_listed_settings_need_another() -> None:
    declared = settings_of(EngineConfig)
    assert {name for name, (each, _) in declared.items() if each.needs is not None} == set(NEEDY)
    EngineConfig(cache_dir=Path("x"), cache_dir_bytes=1)
    EngineConfig(schedule_policy="vtc", tenant_weights="a=2")


def test_numbers_declare_their_ranges() -> None:
    counted = {
        name for name, (declared, _) in settings_of(EngineConfig).items() if declared.kind in ("int", "size")
    }
    assert not {name for name in counted if settings_of(EngineConfig)[name][0].low is None}


def test_a_config_is_never_edited() -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 16  # type: ignore[misc]
    assert dataclasses.replace(config, page_size=16).page_size == 16


def test_k_and_v_take_the_common_format_or_their_own() -> None:
    assert str(EngineConfig(kv_format="fp4").page_formats) == "fp4"
    mixed = EngineConfig(kv_format="int8/fp4").page_formats
    assert (mixed.k, mixed.v, str(mixed)) == ("int8", "fp4", "int8/fp4")
