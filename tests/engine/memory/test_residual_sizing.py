from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.memory.sizing import sizing
from octavo.kernels.formats import FORMATS_WITH_KERNELS
from octavo.kernels.groups import LayerGroup, residual_groups
from octavo.kernels.interface import LayerSpec
from octavo.kernels.residual import ResidualSpec


def test_residual_windows_of_groups() -> None:
    groups = (LayerGroup(window=None, keep=0, members=(0, 2)), LayerGroup(window=40, keep=4, members=(1,)))
    assert residual_groups(groups, ResidualSpec(sink_pages=2, residual_pages=3), 16) == (
        LayerGroup(window=33, keep=32, members=(0, 2)),
        LayerGroup(window=33, keep=4, members=(1,)),
    )
    assert residual_groups(groups, ResidualSpec(residual_pages=4), 16)[1].window == 40


def test_the_budget_pays_for_both_kinds_of_pages() -> None:
    layers = (LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64),) * 3

    def room(**residual: Any) -> tuple[int, tuple[int, ...]]:
        config = EngineConfig(kv_format="fp4", page_size=32, max_running=4, max_step_tokens=64, **residual)
        size = sizing(layers, config, 4096)
        pages = size.pages_within(10_000_000)
        assert size.bytes_for(pages) <= 10_000_000 < size.bytes_for(pages + 1)
        assert [getattr(group, "residual_of", None) for group in size.page_groups(pages)] == [
            None,
            *([0] * (residual != {"residual_pages": 0})),
        ]
        return size.group_bytes[0], size.pages(pages)

    page_bytes, (plain,) = room(residual_pages=0)
    _, (num_pages, num_residual) = room(residual_pages=1)
    assert num_residual == 4 * 1 + 3, "one for each sequence, and a step's"
    residual_bytes = 3 * 2 * 2 * 32 * 128
    assert num_pages == (10_000_000 - num_residual * residual_bytes) // page_bytes < plain
    _, (num_pages, num_residual) = room(residual_pages=2)
    cached = -(-num_pages // 64) - 4
    assert num_residual == 4 * 2 + cached + 4, "two for each that runs, one for every other 2,048 tokens"
    assert room(residual_pages=1, quantize_after=10**6)[1] == (
        num_all := 10_000_000 // (page_bytes + residual_bytes),
        num_all,
    )


def test_settings_that_ask_for_nothing_sensible_are_refused() -> None:
    assert EngineConfig(kv_format="fp4", sink_pages=2, residual_pages=0).residual == ResidualSpec(
        sink_pages=2
    )
    assert EngineConfig(kv_format="int8", sink_pages=2).residual == ResidualSpec(sink_pages=2)
    assert EngineConfig(kv_format="fp4", sink_pages=2).residual == ResidualSpec(
        sink_pages=2, residual_pages=2
    )
    assert EngineConfig(kv_format="bf16/fp4", residual_pages=3).residual == ResidualSpec(residual_pages=3)
    for settings, message in (
        ({"sink_pages": -1}, "sink_pages must be at least 0, got -1"),
        ({"residual_pages": 1}, "all pages of bf16 are 16-bit pages"),
        ({"quantize_after": 9, "kv_format": "fp16"}, "all pages of fp16 are 16-bit pages"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            EngineConfig(**settings)


@pytest.mark.parametrize("name", FORMATS_WITH_KERNELS)
def test_formats_of_five_bits_or_less_get_two_residual_pages(name: str) -> None:
    coarse = name not in ("bf16", "fp16", "int8", "affine8")
    for kv_format in (name, f"{name}/bf16", f"bf16/{name}"):
        config = EngineConfig(kv_format=kv_format)
        assert config.residual == (ResidualSpec(residual_pages=2) if coarse else None)
        assert config.residual_is_optional
        assert EngineConfig(kv_format=kv_format, residual_pages=0).residual is None
    wishes: tuple[dict[str, Any], ...] = (
        {"residual_pages": 2}, {"sink_pages": 1},
    )  # fmt: skip
    for wish in wishes:
        assert not EngineConfig(kv_format="fp4", **wish).residual_is_optional


def test_residual_pages_follow_the_sequences_that_have_room_to_run() -> None:
    layers = (LayerSpec(num_kv_heads=8, head_dim=128, value_dim=128),) * 28
    for memory in (2**28, 2**30, 2**31, 2**33):
        config = EngineConfig(kv_format="fp4", page_size=32, max_running=64, max_step_tokens=512)
        size = sizing(layers, config, 40960)
        num_pages = size.pages_within(memory)
        pages, residual = size.pages(num_pages)
        sequences = -(-pages // 64)
        assert residual == 18 + sequences + min(sequences, 64)
        assert residual * size.group_bytes[1] < memory / (3 if memory < 2**30 else 5)
        assert residual >= 18, "the oldest can always go on"
