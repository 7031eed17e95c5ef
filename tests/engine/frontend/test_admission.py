from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2_grpc
from grpc_status import rpc_status
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from engines import Gate
from fakes import FakeCore, Recording, small_config
from octavo.engine.frontend.async_engine import AsyncEngine
from octavo.engine.grpc.server import GrpcServer
from octavo.proto import generation_pb2 as pb
from octavo.proto import generation_pb2_grpc
from served import LOCAL, all_idle, eventually, served
from vllm_worker import ask

pytestmark = pytest.mark.server

ONE = pb.SamplingParams(max_tokens=1)


async def test_priorities_come_from_the_message_or_the_metadata() -> None:
    gate = Gate()
    watch, config, core = Recording(), small_config(max_running=1), FakeCore(before_step=gate)
    async with served(core, observer=watch, config=config) as its, its.channel() as c:
        own: Any = generation_pb2_grpc.GenerationStub(c)  # type: ignore[no-untyped-call]
        routers: Any = vllm_engine_pb2_grpc.VllmEngineStub(c)

        async def one(call: Any) -> None:
            async for _ in call:
                pass

        tasks: list[asyncio.Task[None]] = []
        urgent = (("octavo-priority", "-1"),)
        calls: dict[str, Callable[[], Any]] = {
            "first": lambda: own.Generate(pb.GenerateRequest(request_id="first", text="a", sampling=ONE)),
            "usual": lambda: own.Generate(pb.GenerateRequest(request_id="usual", text="b", sampling=ONE)),
            "field": lambda: own.Generate(
                pb.GenerateRequest(request_id="field", text="c", sampling=ONE, priority=-2)
            ),
            "metadata": lambda: routers.Generate(ask(request_id="metadata", max_tokens=1), metadata=urgent),
        }
        for name, call in calls.items():
            tasks.append(asyncio.create_task(one(call())))
            await eventually(lambda: its.server.handler.num_active == len(tasks), f"{name} is in")
            await eventually(
                lambda: core.core is not None and core.core._scheduler.num_running == 1, "it runs"
            )
        gate.open()
        await asyncio.gather(*tasks)
    order = [ended.request_id for record in watch.records for ended in record.ended]
    assert order == ["first", "field", "metadata", "usual"]


async def test_a_priority_that_is_none_is_refused() -> None:
    async with served() as its, its.channel() as c:
        stub: Any = generation_pb2_grpc.GenerationStub(c)  # type: ignore[no-untyped-call]
        for request, metadata in (
            (pb.GenerateRequest(text="a", sampling=ONE, priority=2**30), ()),
            (pb.GenerateRequest(text="a", sampling=ONE), (("octavo-priority", "soon"),)),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="priority") as caught:
                await stub.Generate(request, metadata=metadata).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_waiting_too_long_is_resource_exhausted_with_a_time_to_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()
    config = small_config(max_running=1, queue_timeout=30)
    async with served(FakeCore(before_step=gate), config=config) as its:
        first = its.client.stub.Generate(pb.GenerateRequest(text="a", sampling=ONE))
        await eventually(lambda: its.server.handler.num_active == 1, "the first is in")
        await eventually(lambda: gate.is_waiting, "it is being computed")
        monkeypatch.setattr(its.engine._open.limiter, "_timeout_s", 0.2)
        with pytest.raises(grpc.aio.AioRpcError, match="queue_timeout") as caught:
            await its.client.stub.Generate(pb.GenerateRequest(text="b", sampling=ONE)).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert status is not None
        assert status.details[0].Unpack(info)
        assert info.reason == "QUEUE_TIMEOUT"
        assert status.details[1].Unpack(retry)
        gate.open()
        assert [response.finish_reason async for response in first][-1] == pb.FINISH_REASON_LENGTH


async def test_a_deadline_that_passes_in_the_queue_computes_nothing() -> None:
    gate = Gate()
    async with served(FakeCore(before_step=gate), config=small_config(max_running=1)) as its:
        first = its.client.stub.Generate(pb.GenerateRequest(text="a", sampling=ONE))
        await eventually(lambda: its.server.handler.num_active == 1, "the first is in")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await its.client.stub.Generate(pb.GenerateRequest(text="b" * 50), timeout=0.3).read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: its.server.handler.num_active == 1, "the second is out")
        gate.open()
        assert [response async for response in first]
        await eventually(lambda: all_idle(its.engine), "all idle")
        assert its.num_steps == 1, "nothing of the second was computed"


async def test_reflection_can_be_left_out_and_large_messages_are_not_read() -> None:
    engine = AsyncEngine(small_config(), core_factory=FakeCore())
    await engine.start()
    server = GrpcServer(engine, with_reflection=False, max_message_bytes=10_000)
    address = str(await server.start(LOCAL))
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            mirror: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await mirror.ServerReflectionInfo().read()  # a write may fail with another status
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as refused:
                await stub.Generate(pb.GenerateRequest(text="x" * 20_000)).read()
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await stub.Generate(pb.GenerateRequest(text="x", sampling=ONE)).read()).token_ids
    finally:
        await server.stop()
