from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from octavo.block_manager import FullAttention
from octavo.block_manager.spec import UNBOUNDED
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.memory.sizing import Sizing, num_pages_for, sizing
from octavo.kernels.groups import LayerGroup, group_layers
from octavo.kernels.interface import LayerSpec

GIB = 1024**3


def layer(window: int | None = None, keep: int = 0) -> LayerSpec:
    return LayerSpec(num_kv_heads=1, head_dim=16, value_dim=16, window=window, keep=keep)


def plain(bytes_per_page: int = 1000) -> Sizing:
    return Sizing(
        groups=(LayerGroup(window=None, keep=0, members=(0,)),),
        specs=(FullAttention(num_pages=UNBOUNDED),),
        group_bytes=(bytes_per_page,),
        page_size=32,
    )


def num_pages(bytes_per_page: int = 1000, **changes: int | None) -> int:
    settings: dict[str, int | None] = {
        "kv_memory": None, "num_pages": None, "max_running": 4, "max_model_len": 4096, "available": 10**12,
    }  # fmt: skip
    return num_pages_for(plain(bytes_per_page), **(settings | changes))  # type: ignore[arg-type]


def test_the_pool_has_the_requested_size() -> None:
    assert num_pages(num_pages=7) == 7
    assert num_pages(kv_memory=10_999) == 10


def test_the_default_pool_holds_the_running_sequences_within_limits() -> None:
    assert num_pages() == 4 * 2048 // 32
    assert num_pages(max_running=1) == 4096 // 32, "at least one sequence of full length"
    assert num_pages(max_model_len=64) == 4 * 64 // 32
    assert num_pages(bytes_per_page=2**26) == 2 * GIB // 2**26
    assert num_pages(available=40_000) == 10


def test_a_pool_without_a_page_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        InvalidConfig, match=r"kv_memory is 999 B, but one page of 32 positions takes 0.98 KiB"
    ):
        num_pages(kv_memory=999)


def test_layers_of_one_window_form_a_group_and_those_without_come_first() -> None:
    layers = [layer(12), layer(), layer(12), layer(40), layer(12, keep=4), layer(100)]
    groups = group_layers(layers, max_model_len=64)
    assert [(group.window, group.keep, group.members) for group in groups] == [
        (None, 0, (1, 5)),
        (40, 0, (3,)),
        (12, 4, (4,)),
        (12, 0, (0, 2)),
    ]
    assert [group.members for group in group_layers([layer(12)] * 3, 64)] == [(0, 1, 2)]


@given(
    st.lists(st.tuples(st.sampled_from([None, 8, 33, 200]), st.sampled_from([0, 5])), min_size=1, max_size=6),
    st.integers(1, 64),
    st.integers(0, 10**6),
    st.sampled_from([1, 8, 32]),
)
def test_a_budget_is_spent_and_not_exceeded(
    kinds: list[tuple[int | None, int]], max_running: int, budget: int, page_size: int
) -> None:
    config = EngineConfig(
        kv_format="bf16/fp4",
        residual_pages=0,
        page_size=page_size,
        max_running=max_running,
        max_step_tokens=64,
    )
    size = sizing([layer(window, keep if window else 0) for window, keep in kinds], config, 150)
    pages = size.pages_within(budget)
    assert size.bytes_for(pages) <= budget < size.bytes_for(pages + 1)
    groups = size.page_groups(max(pages, 1))
    assert groups[0].num_pages == max(pages, 1)
    for group in groups:
        assert group.num_pages <= groups[0].num_pages
        if group.num_pages < groups[0].num_pages:
            assert group.window is not None
            touched = group.window // page_size + 1 + -(-group.keep // page_size)
            assert group.num_pages >= 2 * max_running * touched + 64 // page_size
