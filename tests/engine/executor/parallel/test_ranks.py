from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from ctypes.util import find_library
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import psutil
import pytest

import ranked
import tiny_adapters
import tiny_heads
from large_channels import with_large_channels
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.client.client import Client
from octavo.engine.client.server_process import ServerProcess
from octavo.engine.executor.parallel import is_follower
from octavo.engine.executor.parallel.group import _free_ports, _joined
from octavo.engine.executor.parallel.shards import Shard
from page_stores import RedisServer
from served import collect, eventually
from tiny_models import make_model

SPLIT = {
    "deepseek_v32": False, "gpt_oss": True, "iquestloopcoder": True, "longcat_flash_ngram": False,
    "minimax_m3_vl": False, "mistral4": False, "qwen2": True, "qwen3_5": False, "qwen3_moe": True,
    "step3p5": True,
}  # fmt: skip
"""Architectures that mlx-lm can split; True: each rank has a part of the pages."""


def check(model: Path, num_ranks: int, *, share: bool = True, **settings: Any) -> None:
    one = ranked.answers(model, **settings)
    several = ranked.in_ranks(model, tensor_parallel=num_ranks, **settings)
    assert several["tokens"] == one["tokens"]
    assert several["cached"] == one["cached"]
    assert several["preempted"] or "num_pages" not in settings
    assert several["guided"] == one["guided"]
    assert several["same_alone"], "a sequence's bits depend on its batch"
    if share:
        assert several["page_bytes"] == [one["page_bytes"][0] // num_ranks] * num_ranks


def test_two_ranks_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    check(make_model(tmp_path / "m", "qwen3", dtype=mx.float32), 2)


@pytest.mark.slow
def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(AssertionError, match="tensor_parallel must divide the heads"):
        ranked.in_ranks(Path("demo"), tensor_parallel=3)


@pytest.mark.parametrize("kind", ["tensor_parallel", "pipeline_parallel"])
def test_steps_of_ranks_that_overlap_are_refused(kind: str) -> None:
    settings: dict[str, Any] = {kind: 2, "async_steps": True}
    with pytest.raises(InvalidConfig, match=f"async_steps must be left out with {kind}, which"):
        EngineConfig(**settings)


def test_both_kinds_of_ranks_together_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="pipeline_parallel must be 1 with tensor_parallel=2, got 3"):
        EngineConfig(tensor_parallel=2, pipeline_parallel=3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), SPLIT.items())
def test_architectures_that_can_be_split(tmp_path: Path, name: str, share: bool) -> None:
    check(ranked.tiny(tmp_path / "m", name), 2, share=share)


@pytest.mark.slow
def test_a_16_bit_model_has_the_same_bits_alone_and_in_a_batch(tmp_path: Path) -> None:
    model = ranked.tiny(tmp_path / "m", "gpt_oss", mx.bfloat16)
    assert ranked.in_ranks(model, tensor_parallel=2)["same_alone"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5"])
def test_four_ranks(tmp_path: Path, name: str) -> None:
    heads: dict[str, Any] = {"num_key_value_heads": 4, "linear_num_key_heads": 4}
    check(ranked.tiny(tmp_path / "m", name, **heads), 4, share=name != "qwen3_5")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"kv_format": "fp5/fp4", "speculate": "suffix"}, {"num_pages": 16},
        {"weights": "int8", "max_kv_size": 24, "speculate": "ngram"},
    ],
    ids=str,
)  # fmt: skip
def test_formats_preemption_drafts_and_windows(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = make_model(tmp_path / "m", "qwen3", dtype=mx.float32, hidden_size=128)
    check(model, 2, share="kv_format" not in settings, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor_parallel", "pipeline_parallel"])
def test_auto_chooses_the_page_format_of_one_process(tmp_path: Path, kind: str) -> None:
    model = with_large_channels(tmp_path / "m", 128.0, mx.float32)
    one = ranked.answers(model, kv_format="auto")
    several = ranked.in_ranks(model, kv_format="auto", **{kind: 2})
    assert several["kv_format"] == one["kv_format"] == "int8/fp4"
    assert several["tokens"] == one["tokens"]
    assert sum(several["page_bytes"]) == one["page_bytes"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "kind"),
    [("draft", "pipeline_parallel"), ("mtp", "tensor_parallel"), ("mtp", "pipeline_parallel")],
)
def test_rank_0_drafts_for_all(tmp_path: Path, source: str, kind: str) -> None:
    model = tiny_heads.make_model(tmp_path / "m", "qwen3_5", agrees=True, dtype=mx.float32)
    settings: dict[str, Any] = {"speculate": f"draft:{model}" if source == "draft" else "mtp"}
    one = ranked.answers(model, **settings)
    several = ranked.in_ranks(model, **settings, **{kind: 2})
    assert several["tokens"] == one["tokens"]
    assert sum(several["state_bytes"]) == one["state_bytes"][0], "drafts need states on all ranks"
    assert several["same_alone"], "a sequence's bits depend on its batch"
    assert several["accepted"] > 4 * several["rejected"]


@pytest.mark.parametrize("is_made", [True, False])
def test_a_rank_without_a_result_leaves_all_without(is_made: bool) -> None:
    def make() -> int:
        if not is_made:
            raise InvalidConfig("no such heads")
        return 7

    others = Shard(SimpleNamespace(rank=0, smallest=lambda value: min(value, 0)))  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="all ranks" if is_made else "no such heads"):
        others.by_all(make)
    equal = Shard(SimpleNamespace(rank=0, smallest=lambda value: value))  # type: ignore[arg-type]
    assert not is_made or equal.by_all(make) == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [("tensor_parallel", "qwen3"), ("pipeline_parallel", "gpt_oss"), ("tensor_parallel", "qwen3_5")],
)
def test_stored_pages_are_found_by_the_same_ranks_only(tmp_path: Path, kind: str, name: str) -> None:
    model, store, saved = ranked.tiny(tmp_path / "m", name), tmp_path / "store", tmp_path / "p.safetensors"
    settings: dict[str, Any] = {"cache_dir": str(store), "state_memory": 2**20, kind: 2}
    cold = ranked.in_ranks(model, **settings, save=str(saved))
    warm = ranked.in_ranks(model, **settings)
    assert cold["found"] == [0, 0, 0, 0, 0]
    assert warm["found"][3] == 64
    for file in store.rglob("*.safetensors"):
        with file.open("r+b") as stream:  # a byte of rank 1
            stream.seek(-1, os.SEEK_END)
            byte = stream.read()[0]
            stream.seek(-1, os.SEEK_END)
            stream.write(bytes([byte ^ 1]))
    damaged = ranked.in_ranks(model, **settings, swap_memory=2**20, num_pages=14)
    assert damaged["dropped"]["altered"] > 0
    assert damaged["swapped"] > 0 or name == "qwen3_5"
    del settings["cache_dir"]
    loaded = ranked.in_ranks(model, **settings, load=str(saved))
    assert loaded["found"][3] == 64
    one = ranked.answers(model, cache_dir=store, load=str(saved), state_memory=2**20)
    assert one["found"] == cold["found"]
    assert "with other attention windows or ranks" in one["refused"]
    for each in (cold, warm, damaged, loaded):
        assert each["tokens"] == one["tokens"]


@pytest.mark.slow
def test_pages_in_a_remote_cache_are_found_by_the_same_ranks_only(tmp_path: Path) -> None:
    model, server = ranked.tiny(tmp_path / "m", "qwen3"), RedisServer(tmp_path)
    try:
        server.start()
        server.wait()
        settings: dict[str, Any] = {"remote_cache": server.url, "tensor_parallel": 2}
        cold, warm = [ranked.in_ranks(model, **settings) for _ in range(2)]
        for key in (keys := [key for key in server.client.keys("octavo:*") if b"written" not in key]):
            data = server.client.get(key)
            server.client.set(key, data[:-1] + bytes([data[-1] ^ 1]))  # a byte of rank 1
        damaged = ranked.in_ranks(model, **settings)
        one = ranked.answers(model, remote_cache=server.url)
    finally:
        server.close()
    assert cold["found"] == one["found"] == [0, 0, 0, 0, 0]
    assert warm["found"][3] == 64
    assert len(keys) > 8
    assert damaged["dropped"]["altered"] > 0
    for each in (cold, warm, damaged):
        assert each["tokens"] == one["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "keys"),
    [
        ("tensor_parallel", "qwen3", tiny_adapters.DENSE),
        ("tensor_parallel", "qwen3_moe", tiny_adapters.SWITCH),
        ("tensor_parallel", "qwen3_5", tiny_adapters.MIXER),
        ("pipeline_parallel", "qwen3", tiny_adapters.DENSE),
    ],
)
def test_adapters_give_the_tokens_of_one_process(
    tmp_path: Path, kind: str, name: str, keys: list[str]
) -> None:
    hybrid: dict[str, Any] = {"text_config": tiny_adapters.HYBRID} if name == "qwen3_5" else {}
    model = make_model(tmp_path / "m", name, dtype=mx.float32, **hybrid)
    adapters = [
        str(tiny_adapters.make_adapter(tmp_path / str(rank), model, rank=rank, keys=keys, seed=rank, kind=of))
        for rank, of in ((4, "lora"), (8, "lora" if name == "qwen3_moe" else "dora"))
    ]
    settings: dict[str, Any] = {"adapters": adapters, "lora_memory": 2**22, "max_loras": 1}
    one = ranked.answers(model, **settings)
    several = ranked.in_ranks(model, **settings, **{kind: 2})
    assert several["tokens"] == one["tokens"]
    assert several["adapted"] == one["adapted"]
    assert len({str(each) for each in (one["tokens"][0], *one["adapted"][:2])}) == 3


def _in_folders(folder: Path) -> list[str]:
    """Return a launcher of two ranks, each in the folder that its number names."""
    program = folder / "in_folder.sh"
    program.write_text(f'#!/bin/sh\ncd "{folder}/$MLX_RANK" && exec "$@"\n')
    program.chmod(0o755)
    return [*_launcher(folder), str(program)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor_parallel", "pipeline_parallel"])
def test_adapters_that_differ_between_ranks_are_refused(tmp_path: Path, kind: str) -> None:
    model = make_model(tmp_path / "m", "qwen3", dtype=mx.float32)
    for rank in (0, 1):
        tiny_adapters.make_adapter(tmp_path / f"{rank}" / "same", model)
        tiny_adapters.make_adapter(tmp_path / f"{rank}" / "other", model, seed=2 + rank)
    tiny_adapters.make_adapter(tmp_path / "0" / "missing", model)
    launcher = _in_folders(tmp_path)
    settings: dict[str, Any] = {"lora_memory": 2**22, "max_loras": 1}
    several = ranked.in_ranks(
        model, *launcher, **settings, adapters=["same"], wrong=["other", "missing"], **{kind: 2}
    )
    one = ranked.answers(model, **settings, adapters=(str(tmp_path / "0" / "same"),))
    assert several["tokens"] == one["tokens"]
    assert several["adapted"] == one["adapted"] != one["tokens"][:3]
    assert several["failures"] == 2 * [
        "adapters must have the same files on all ranks, got others on rank 1 for other; copy the folder to "
        "each machine"
    ] + 2 * [
        "rank 1: an adapter must be a folder with adapter_config.json, got missing without it; .bin, .pt and "
        ".npz files are not read: save the adapter as safetensors"
    ]  # fmt: skip
    says = "lora_modules: adapters must have the same files on all ranks, got others on rank 1 for other"
    with pytest.raises(AssertionError, match=says):
        ranked.in_ranks(model, *launcher, **settings, lora_modules=["a=other"], **{kind: 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "num_ranks"),
    [
        ("tensor_parallel", "qwen3_5", 2),
        ("tensor_parallel", "qwen3_vl", 2),
        ("pipeline_parallel", "qwen3_vl", 4),
    ],
)
def test_images_give_the_tokens_of_one_process(tmp_path: Path, kind: str, name: str, num_ranks: int) -> None:
    tiny_vlm: Any = pytest.importorskip("tiny_vlm", reason="pip install '.[vision]'")
    model = tiny_vlm.make_vlm(tmp_path / name, name)
    settings: dict[str, Any] = {"vision": True, "exact": True, "state_memory": 2**20}
    one = ranked.answers(model, **settings)
    several = ranked.in_ranks(model, **settings, **{kind: num_ranks})
    assert several["tokens"] == one["tokens"]
    assert several["seen"] == one["seen"]
    assert len({str(each) for each in one["seen"]}) == 3


def _ranks_of(server: ServerProcess) -> list[psutil.Process]:
    ranks = [each for each in psutil.Process(server.pid).children() if "MLX_RANK" in each.environ()]
    return sorted(ranks, key=lambda each: each.environ()["MLX_RANK"])


def _have_ended(processes: list[psutil.Process]) -> bool:
    def has_ended(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == "zombie"
        except psutil.NoSuchProcess:
            return True

    return all(map(has_ended, processes))


def _launcher(folder: Path) -> list[str]:
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    program = Path(sys.executable).with_name("mlx.launch")
    return [str(program), "--hostfile", str(hosts), "--starting-port", str(_free_ports(1)[0]), "--"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor_parallel", "pipeline_parallel"])
def test_mlx_launch_starts_ranks_of_a_program(tmp_path: Path, kind: str) -> None:
    model = make_model(tmp_path / "m", "qwen3", dtype=mx.float32)
    several = ranked.in_ranks(model, *_launcher(tmp_path), **{kind: 2})
    assert several["tokens"] == ranked.answers(model)["tokens"]
    with pytest.raises(AssertionError, match=f"{kind} must be the number of launched ranks, 2, got 3"):
        ranked.in_ranks(model, *_launcher(tmp_path), **{kind: 3})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor_parallel", "pipeline_parallel"])
def test_mpirun_starts_ranks_of_a_program(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (program := shutil.which("mpirun")) is None:
        pytest.skip("Open MPI is not installed: apt-get install openmpi-bin")
    monkeypatch.setenv("MLX_MPI_LIBNAME", find_library("mpi") or "")
    model = make_model(tmp_path / "m", "qwen3", dtype=mx.float32)
    launcher = [program, "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    several = ranked.in_ranks(model, *launcher, **{kind: 2})
    assert several["tokens"] == ranked.answers(model)["tokens"]


def test_programs_under_mpirun_may_be_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert not is_follower(EngineConfig())
    assert is_follower(EngineConfig(tensor_parallel=2))
    monkeypatch.setenv("MLX_RANK", "1")
    with pytest.raises(InvalidConfig, match=r"number of hosts of mlx\.launch, got 1 of each"):
        is_follower(EngineConfig())


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("MLX_HOSTFILE", r"got ring \(.*\); list two or more hosts"),
        ("MLX_JACCL_COORDINATOR", r"got jaccl \(.*\); it needs RDMA over Thunderbolt"),
        ("OMPI_COMM_WORLD_RANK", r"got mpi \(.*\); set MLX_MPI_LIBNAME"),
    ],
)
def test_a_back_end_that_mlx_cannot_start_is_refused(
    variable: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "0")
    monkeypatch.setenv("MLX_MPI_LIBNAME", "none")
    with pytest.raises(InvalidConfig, match=message):
        _joined()


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize(("kind", "ended"), [("--tensor-parallel", 1), ("--pipeline-parallel", 0)])
async def test_mlx_launch_starts_ranks_of_a_server(tmp_path: Path, kind: str, ended: int) -> None:
    server = ServerProcess(["--model", "demo", kind, "2", "--threads", "1"], launcher=_launcher(tmp_path))
    await server.start()
    processes = [psutil.Process(server.pid), *_ranks_of(server)]
    async with Client(server.ready["grpc"]) as client:
        await collect(client.generate("One", SamplingParams(max_tokens=4)))
    assert len(processes) == 3
    processes[1 + ended].send_signal(signal.SIGKILL if ended else signal.SIGTERM)
    await eventually(lambda: _have_ended(processes), "all have ended")
    await server.wait()
    line = "octavo: rank 1 on 127.0.0.1 has exited, so all ranks stop"
    assert (line in server.last_errors) == bool(ended)


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize(
    ("kind", "killed"), [("--tensor-parallel", 1), ("--pipeline-parallel", 0), ("--pipeline-parallel", 2)]
)
async def test_when_one_rank_is_killed_all_end(kind: str, killed: int) -> None:
    num_ranks = 2 if kind == "--tensor-parallel" else 3
    server = ServerProcess(["--model", "demo", kind, str(num_ranks), "--threads", "1"])
    async with server:
        async with Client(server.ready["grpc"]) as client:
            await collect(client.generate("One", SamplingParams(max_tokens=4)))
        processes = [psutil.Process(server.pid), *_ranks_of(server)]
        assert len(processes) == num_ranks
        processes[killed].send_signal(signal.SIGKILL)
        await eventually(lambda: _have_ended(processes), "all have ended")
    how = " with status -9" if killed else ""
    lines = [line for line in server.last_errors if "so all ranks stop" in line]
    assert lines == [f"octavo: rank {killed} has exited{how}, so all ranks stop"]


@pytest.mark.slow
@pytest.mark.server
async def test_a_signal_ends_every_rank() -> None:
    async with ServerProcess(["--model", "demo", "--pipeline-parallel", "2", "--threads", "1"]) as server:
        (rank,) = _ranks_of(server)
    assert server.returncode == 0
    assert not any("so all ranks stop" in line for line in server.last_errors)
    assert not rank.is_running()
