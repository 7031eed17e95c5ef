from __future__ import annotations

import dataclasses
import importlib
import os
import signal
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest

import ranked
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.client.client import Client
from octavo.engine.client.server_process import ServerProcess
from octavo_lab.architectures.configurations import configuration
from served import collect, eventually
from tiny_models import VOCAB_SIZE, make_model

SPLIT = {
    "deepseek_v32": False, "gpt_oss": True, "iquestloopcoder": True, "longcat_flash_ngram": False,
    "minimax_m3_vl": False, "mistral4": False, "qwen2": True, "qwen3_5": False, "qwen3_moe": True,
    "step3p5": True,
}  # fmt: skip
"""Architectures that mlx-lm can split; True: each rank has a part of the pages."""


def tiny(folder: Path, name: str) -> Path:
    arguments = importlib.import_module(f"mlx_lm.models.{name}").ModelArgs
    taken = {each.name for each in dataclasses.fields(arguments)}
    config = {key: value for key, value in configuration(name).items() if key in taken}
    if "text_config" in config:
        config["text_config"] |= {"vocab_size": VOCAB_SIZE}
    return make_model(folder, name, dtype=mx.float32, **config | {"vocab_size": VOCAB_SIZE})


def check(model: Path, num_ranks: int, *, share: bool = True, **settings: Any) -> None:
    one = ranked.answers(model, 1, **settings)
    several = ranked.in_ranks(model, num_ranks, **settings)
    assert several["tokens"] == one["tokens"]
    assert several["cached"] == one["cached"]
    assert several["same_alone"], "a sequence's bits depend on its batch"
    if share:
        assert several["page_bytes"] * num_ranks == one["page_bytes"]


def test_two_ranks_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    check(make_model(tmp_path / "m", "qwen3", dtype=mx.float32), 2)


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(AssertionError, match="tensor_parallel must divide the heads"):
        ranked.in_ranks(Path("demo"), 3)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"swap_memory": 2**20}, "swap_memory must be left out with tensor_parallel"),
        ({"lora_memory": 2**20}, "lora must be left out"),
        ({"kv_format": "auto"}, "kv_format must not be auto"),
        ({"speculate": "mtp"}, "speculate must not be mtp"),
        ({"speculate": "draft:x"}, "draft_model must be left out"),
    ],
)
def test_what_ranks_cannot_do_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        EngineConfig(tensor_parallel=2, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), SPLIT.items())
def test_architectures_that_can_be_split(tmp_path: Path, name: str, share: bool) -> None:
    check(tiny(tmp_path / "m", name), 2, share=share)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    check(make_model(tmp_path / "m", "llama", dtype=mx.float32, num_key_value_heads=4), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"kv_format": "fp5/fp4"}, {"num_pages": 14, "speculate": "ngram"},
        {"weights": "int8", "max_kv_size": 24},
    ],
    ids=str,
)  # fmt: skip
def test_formats_preemption_drafts_and_windows(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = make_model(tmp_path / "m", "qwen3", dtype=mx.float32, hidden_size=128)
    check(model, 2, share="kv_format" not in settings, **settings)


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize("killed", ["rank 0", "rank 1"])
async def test_when_one_rank_is_killed_all_end(killed: str) -> None:
    server = ServerProcess(["--model", "demo", "--tensor-parallel", "2", "--threads", "1"])
    async with server:
        async with Client(server.ready["grpc"]) as client:
            await collect(client.generate("One", SamplingParams(max_tokens=4)))
        ranks = [
            p
            for p in psutil.Process(server.pid).children()
            if "octavo.engine.executor.parallel" in p.cmdline()
        ]
        assert len(ranks) == 1
        os.kill(server.pid if killed == "rank 0" else ranks[0].pid, signal.SIGKILL)
        gone = (ranks[0], psutil.Process(server.pid))
        await eventually(
            lambda: not any(p.is_running() and p.status() != "zombie" for p in gone), "all have ended"
        )
    if killed == "rank 1":
        assert server.last_errors[-1] == "octavo: rank 1 has ended with code -9, and all end with it"


@pytest.mark.slow
@pytest.mark.server
async def test_a_signal_ends_every_rank() -> None:
    async with ServerProcess(["--model", "demo", "--tensor-parallel", "2", "--threads", "1"]) as server:
        (rank,) = (
            p
            for p in psutil.Process(server.pid).children()
            if "octavo.engine.executor.parallel" in p.cmdline()
        )
    assert server.returncode == 0
    assert not rank.is_running()
