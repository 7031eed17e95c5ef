from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import ranked
from octavo.block_manager import FullAttention
from octavo.block_manager.spec import UNBOUNDED
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.executor.load import load
from octavo.engine.executor.load.loader import load_model
from octavo.engine.executor.parallel.stages import Stage
from octavo.engine.memory.sizing import Sizing
from octavo.kernels.groups import LayerGroup
from tiny_models import make_model


@dataclass
class Ranks:
    rank: int
    size: int
    num_here: int = 1
    sent: dict[int, Any] = field(default_factory=dict)

    def send(self, values: Any, rank: int) -> None:
        self.sent[rank] = values

    def receive(self, shape: tuple[int, ...], rank: int) -> Any:
        assert rank == self.rank + 1
        assert self.sent[self.rank].shape == shape
        return self.sent[self.rank]


def weights_of(model: Path, num_ranks: int) -> list[dict[str, mx.array]]:
    """Return the weights of each rank, beginning with the rank that has the first layers."""
    sent: dict[int, Any] = {}
    found = []
    for rank in reversed(range(num_ranks)):
        stage = Stage(Ranks(rank, num_ranks, sent=sent))  # type: ignore[arg-type]
        loaded = load_model(model, weights="keep", change=stage.split)
        found.append(dict(tree_flatten(loaded.model.parameters())))
    return found


def check(model: Path, num_ranks: int, parts: list[int], **settings: Any) -> None:
    """Compare ranks with one process; ``parts`` has the number of layers of each rank, rank 0 first."""
    one = ranked.answers(model, **settings)
    several = ranked.in_ranks(model, pipeline_parallel=num_ranks, **settings)
    assert several["bits"] == one["bits"]
    assert several["more"] == one["more"], "parallel samples, a grammar and scored prompts"
    assert several["cached"] == one["cached"]
    assert several["preempted"] or "num_pages" not in settings
    assert several["same_alone"], "a sequence's bits depend on its batch"
    for name in ("page_bytes", "state_bytes"):
        assert sum(several[name]) == one[name][0]
    if parts:
        assert several["page_bytes"] == [one["page_bytes"][0] * part // sum(parts) for part in parts]


def test_each_weight_is_on_one_rank(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", "qwen3", tie_word_embeddings=False)
    first, middle, last = weights_of(model, 3)
    whole = dict(tree_flatten(load_model(model, weights="keep").model.parameters()))
    norm = "model.norm.weight"
    assert first.keys() | middle.keys() | last.keys() == whole.keys()
    assert first.keys() & middle.keys() == middle.keys() & last.keys() == first.keys() & last.keys() == {norm}
    assert "model.embed_tokens.weight" in first
    assert "lm_head.weight" in last
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0", "1"}
    assert all(np.array_equal(last[name].view(mx.uint16), whole[name].view(mx.uint16)) for name in last)


def test_tied_embeddings_are_on_the_first_and_the_last_rank(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", "qwen3", tie_word_embeddings=True)
    has_table = ["model.embed_tokens.weight" in weights for weights in weights_of(model, 3)]
    assert has_table == [True, False, True]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gemma4_text", "not enough values to unpack"),
        ("gemma3n", "the output depends on embeddings"),
        ("iquestloopcoder", "some are not computed"),
        ("longcat_flash_ngram", "another module has a cache"),
    ],
)
def test_models_whose_layers_share_values_are_refused(tmp_path: Path, name: str, says: str) -> None:
    model = ranked.tiny(tmp_path / "m", name)
    with pytest.raises(InvalidConfig, match=rf"pipeline_parallel must be 1 for {name} models.*{says}"):
        weights_of(model, 2)


@pytest.mark.parametrize(("num_here", "fits"), [(1, False), (2, True)])
def test_rank_0_must_have_room_for_all_pages_of_its_drafter(num_here: int, fits: bool) -> None:
    size = Sizing(
        groups=(LayerGroup(window=None, keep=0, members=(0,)),),
        specs=(FullAttention(num_pages=UNBOUNDED),),
        group_bytes=(10,),
        page_size=32,
        draft_bytes=lambda pages: 10 * pages,
    )
    config = EngineConfig(num_pages=100)
    stage = Stage(Ranks(0, 2, num_here))  # type: ignore[arg-type]
    with contextlib.nullcontext() if fits else pytest.raises(InvalidConfig, match="100 pages take"):
        assert load._num_pages(config, size, 64, None, 2500, stage) == 100


def test_more_ranks_than_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"must leave at least one layer .* got 5 for 4 layers"):
        weights_of(make_model(tmp_path / "m", "llama"), 5)


def test_two_ranks_give_the_bits_of_one_process(tmp_path: Path) -> None:
    check(make_model(tmp_path / "m", "qwen3"), 2, [2, 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ministral3", "gemma2"])
def test_dense_architectures_in_bf16(tmp_path: Path, name: str) -> None:
    check(make_model(tmp_path / "m", name), 2, [2, 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3_vl", "qwen3_next", "nemotron_h"])
def test_mixtures_latents_and_recurrent_layers(tmp_path: Path, name: str) -> None:
    check(ranked.tiny(tmp_path / "m", name), 2, [])


@pytest.mark.slow
def test_three_ranks_with_latents(tmp_path: Path) -> None:
    check(make_model(tmp_path / "m", "deepseek_v3"), 3, [1, 1, 2])


@pytest.mark.slow
def test_four_ranks_with_one_kind_of_attention_each(tmp_path: Path) -> None:
    check(make_model(tmp_path / "m", "gpt_oss"), 4, [])


@pytest.mark.slow
def test_ranks_with_only_recurrent_layers(tmp_path: Path) -> None:
    check(ranked.tiny(tmp_path / "m", "qwen3_5", mx.bfloat16), 4, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"kv_format": "fp5/fp4", "sink_pages": 1}, {"num_pages": 16},
        {"weights": "int8", "max_kv_size": 24, "speculate": "ngram"},
    ],
    ids=str,
)  # fmt: skip
def test_formats_preemption_drafts_and_windows(tmp_path: Path, settings: dict[str, Any]) -> None:
    check(make_model(tmp_path / "m", "mistral", hidden_size=128), 2, [], **settings)
