from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from pathlib import Path

import grpc
import grpc.aio
import pytest
import tokenizers
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines import Gate
from fakes import VOCAB_SIZE, FakeCore
from ledger_runner import EOS
from octavo.engine.grpc.vllm.model_files import read_model_files
from served import all_idle, eventually
from vllm_worker import DemoFiles, ask, worker

pytestmark = pytest.mark.server


async def test_health_model_and_server() -> None:
    async with worker(DemoFiles()) as its:
        health = await its.stub.HealthCheck(pb.HealthCheckRequest())
        assert health.healthy
        info = await its.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.served_model_name, info.model_type, list(info.architectures)) == (
            "fake", "qwen3", ["Qwen3ForCausalLM"]
        )  # fmt: skip
        assert info.is_generation
        assert (info.vocab_size, info.max_context_length, info.max_req_input_len) == (VOCAB_SIZE, 4096, 255)
        assert list(info.eos_token_ids) == [EOS]
        assert info.tokenizer_path == "", "paths are nobody's business outside"
        await its.generate()
        server = await its.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.server_type, server.block_size, server.max_num_seqs) == ("vllm-grpc", 4, 8)
        assert (server.kv_cache_dtype, server.data_parallel_size) == ("bf16", 1)
        assert server.active_requests == 0
        assert abs(time.time() - server.last_receive_timestamp) < 60
        its.its.server.handler.draining = True
        health = await its.stub.HealthCheck(pb.HealthCheckRequest())
        assert (health.healthy, "draining" in health.message) == (False, True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await its.generate()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_dead_engine_is_not_healthy() -> None:
    def step() -> None:
        raise MemoryError("out of luck")

    async with worker(FakeCore(before_step=step)) as its:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await its.generate()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        health = await its.stub.HealthCheck(pb.HealthCheckRequest())
        assert (health.healthy, "out of luck" in health.message) == (False, True)


async def test_loads() -> None:
    async with worker(gate=(gate := Gate())) as its:
        call = its.stub.Generate(ask(max_tokens=100))
        for _ in range(3):
            gate.allow(1)
            await call.read()
        reply = await its.stub.GetLoads(pb.GetLoadsRequest())
        [load] = reply.loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 0, 1)
        assert 30 < load.num_used_tokens < load.max_total_num_tokens == 256
        assert load.token_usage == load.num_used_tokens / 256
        assert load.gen_throughput > 0
        assert (load.max_running_requests, load.utilization, load.cache_hit_rate) == (8, 1 / 8, 0.0)
        assert not (await its.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads
        call.cancel()
        gate.open()
        await eventually(lambda: all_idle(its.its.engine), "pages idle")


async def test_the_tokenizer_comes_as_a_zip_in_chunks() -> None:
    async with worker(DemoFiles()) as its:
        parts = [part async for part in its.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        again = [part async for part in its.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(part.data for part in parts)
    assert all(len(part.data) <= 65536 for part in parts)
    assert [bool(part.sha256) for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].sha256 == hashlib.sha256(data).hexdigest() == again[-1].sha256
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(archive.namelist())
        assert not any("safetensors" in name for name in archive.namelist())
        tokenizer = tokenizers.Tokenizer.from_str(archive.read("tokenizer.json").decode())
        assert "chat_template" in json.loads(archive.read("tokenizer_config.json"))
    assert tokenizer.decode(tokenizer.encode("Once upon a time").ids) == "Once upon a time"


async def test_missing_methods_are_unimplemented() -> None:
    async with worker() as its:
        calls = {
            grpc.StatusCode.UNIMPLEMENTED: (
                its.stub.StartProfile(common_pb2.StartProfileRequest()),
                its.stub.StopProfile(common_pb2.StopProfileRequest()),
            ),
            grpc.StatusCode.INVALID_ARGUMENT: (
                its.stub.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[1, 2]))),
                its.stub.Embed(pb.EmbedRequest()),
            ),
            grpc.StatusCode.NOT_FOUND: (its.stub.GetTokenizer(common_pb2.GetTokenizerRequest()).read(),),
        }
        for code, awaitables in calls.items():
            for awaitable in awaitables:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await awaitable
                assert caught.value.code() is code


def test_the_sampling_a_model_recommends(tmp_path: Path) -> None:
    assert read_model_files(tmp_path).temperature == 1.0
    assert read_model_files(tmp_path).sampling_json == ""
    settings = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [1]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": [5, 6], "pad_token_id": None}))
    files = read_model_files(tmp_path)
    assert files.temperature == 0.6
    assert json.loads(files.sampling_json) == {"temperature": 0.6, "top_p": 0.9}
    assert (files.bos_token_id, files.pad_token_id, files.architectures) == (5, 0, ())
