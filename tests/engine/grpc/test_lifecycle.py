from __future__ import annotations

import asyncio
import threading

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engines import Gate
from fakes import FakeCore
from octavo.engine.api.address import parse_address
from octavo.engine.api.errors import EngineDead, InvalidConfig
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import Gauges
from octavo.engine.cli import serve
from octavo.engine.grpc.server import GrpcServer
from served import LOCAL, Served, collect, eventually, served

pytestmark = pytest.mark.server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GENERATION = "octavo.v1.Generation"
VLLM = "vllm.grpc.engine.VllmEngine"


async def _health(its: Served, service: str = "") -> int:
    async with its.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(reply.status)


async def test_every_service_is_healthy_and_unknown_ones_are_unknown() -> None:
    async with served() as its:
        for service in ("", GENERATION, VLLM, "grpc.health.v1.Health"):
            assert await _health(its, service) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _health(its, "octavo.v1.Nothing")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


Question = reflection_pb2.ServerReflectionRequest


async def test_reflection_describes_the_service() -> None:
    async with served() as its, its.channel() as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def ask(
            request: reflection_pb2.ServerReflectionRequest,
        ) -> reflection_pb2.ServerReflectionResponse:
            async for reply in stub.ServerReflectionInfo(iter([request])):
                return reply
            raise AssertionError("no reply")

        listed = await ask(Question(list_services=""))
        described = await ask(Question(file_containing_symbol=GENERATION))
    names = {service.name for service in listed.list_services_response.service}
    assert names == {
        GENERATION, "octavo.v1.Cache", VLLM, "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection"
    }  # fmt: skip
    file = descriptor_pb2.FileDescriptorProto.FromString(
        described.file_descriptor_response.file_descriptor_proto[0]
    )
    methods = {method.name for method in file.service[0].method}
    assert methods == {
        "Generate", "GenerateMany", "Embed", "Rerank", "Tokenize", "Detokenize", "Abort", "GetModelInfo",
        "GetServerInfo", "LoadAdapter", "UnloadAdapter", "ListAdapters",
    }  # fmt: skip


async def test_draining_finishes_running_and_refuses_new_requests() -> None:
    gate = Gate()
    gate.allow(1)
    async with served(gate=gate) as its:
        deltas = its.client.generate("hello", SamplingParams(max_tokens=100))
        first = await anext(deltas)
        async with its.channel() as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=GENERATION)
            )
            assert (await watch.read()).status == SERVING
            stopping = asyncio.create_task(its.server.stop(drain_timeout=30.0))
            assert (await watch.read()).status == NOT_SERVING
        assert await _health(its) == NOT_SERVING
        with pytest.raises(EngineDead, match="draining"):
            await collect(its.client.generate("other", SamplingParams(max_tokens=1)))
        gate.open()
        rest = await collect(deltas)
        assert rest[0].finish_reason is FinishReason.LENGTH
        assert len(first.token_ids) + len(rest[0].token_ids) == 100
        await stopping


async def test_a_drain_that_takes_too_long_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    gate.allow(3)
    async with served(gate=gate) as its:
        task = asyncio.create_task(collect(its.client.generate("hello", SamplingParams(max_tokens=200))))
        await eventually(lambda: its.engine.gauges().num_running == 1, "it runs")
        thread = its.engine._client
        assert thread is not None
        abort = thread.abort

        def aborting(number: int) -> None:
            abort(number)
            gate.open()

        monkeypatch.setattr(thread, "abort", aborting)
        await its.server.stop(drain_timeout=0.05)
        whole = await task
        assert whole[0].finish_reason is FinishReason.ABORT
        assert 0 < len(whole[0].token_ids) <= 4


async def test_a_dead_engine_fails_every_stream_and_the_health_check() -> None:
    gate, dying = Gate(), threading.Event()

    def step() -> None:
        gate()
        if dying.is_set():
            raise MemoryError("out of luck")

    async with served(FakeCore(before_step=step)) as its:
        streams = [its.client.generate(f"hello {i}", SamplingParams(max_tokens=200)) for i in range(3)]
        firsts = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await eventually(lambda: len(its.engine._open.streams()) == 3, "all are in")
        gate.allow(5)
        await asyncio.gather(*firsts)
        dying.set()
        gate.open()
        for stream in streams:
            with pytest.raises(EngineDead, match="out of luck"):
                await collect(stream)
        await asyncio.wait_for(its.server.died.wait(), 10)
        assert await _health(its) == NOT_SERVING
        assert await _health(its, GENERATION) == NOT_SERVING
        with pytest.raises(EngineDead, match="out of luck"):
            await collect(its.client.generate("more", SamplingParams(max_tokens=1)))
        with pytest.raises(EngineDead, match="out of luck"):
            await its.client.model_info()
        many = its.client.stub.GenerateMany(iter([]))
        assert [response async for response in many] == []


async def test_the_command_ends_with_1_when_its_engine_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        raise MemoryError("out of luck")

    monkeypatch.setattr(serve, "DEATH_LINGER_S", 0.2)
    async with served(FakeCore(before_step=step)) as its:
        probes = serve.ServerProbes(its.engine)
        assert "loaded" in str(probes.ready())
        probes.server = its.server
        assert (probes.ready(), probes.alive()) == (None, None)
        ending = asyncio.create_task(serve._serve_until_end(its.server, asyncio.Event(), 30.0))
        with pytest.raises(EngineDead, match="out of luck"):
            await collect(its.client.generate("hello", SamplingParams(max_tokens=2)))
        await asyncio.wait_for(its.server.died.wait(), 10)
        assert await _health(its) == NOT_SERVING, "it stays for a while, to say so"
        assert "out of luck" in str(probes.ready())
        assert "out of luck" in str(probes.alive())
        assert probes.gauges() == Gauges()
        assert await ending == 1


async def test_a_draining_server_is_alive_and_not_ready() -> None:
    async with served() as its:
        probes = serve.ServerProbes(its.engine)
        probes.server = its.server
        await its.server.stop()
        assert probes.alive() is None
        assert "draining" in str(probes.ready())


async def test_a_port_in_use_is_refused_with_the_remedy() -> None:
    async with served() as its:
        second = GrpcServer(its.engine)
        with pytest.raises(InvalidConfig, match=r"port is in use.*--listen"):
            await second.start(parse_address(its.address))
        whole = await collect(its.client.generate("hello", SamplingParams(max_tokens=2)))
        assert len(whole[0].token_ids) == 2, "the first one is not disturbed"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "HOST:PORT"),
        ("50051", "HOST:PORT"),
        (":50051", "HOST:PORT"),
        ("localhost:", "port"),
        ("localhost:http", "http"),
        ("localhost:65536", "65536"),
        ("localhost:-1", "-1"),
        ("::1:50051", "brackets"),
    ],
)
def test_invalid_addresses_are_refused(text: str, hint: str) -> None:
    with pytest.raises(InvalidConfig, match=hint):
        parse_address(text)


def test_addresses() -> None:
    assert (parse_address("[::1]:80").host, str(parse_address("[::1]:80"))) == ("::1", "[::1]:80")
    assert parse_address("127.0.0.1:0") == LOCAL
