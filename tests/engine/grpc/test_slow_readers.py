from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from engines import Gate
from fakes import FakeCore, small_config
from octavo.engine.api.errors import InvalidRequest, Overloaded
from octavo.engine.api.output_collector import prompt_logprobs_bytes
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.frontend import output_streams, request_limiter
from octavo.engine.grpc.octavo_v1 import generation
from octavo.proto import generation_pb2 as pb
from octavo.proto import generation_pb2_grpc
from served import Served, all_idle, collect, eventually, served

pytestmark = pytest.mark.server

NARROW = {"grpc__http2__lookahead_bytes": 1024, "grpc__http2__bdp_probe": 0}
SHORT = SamplingParams(max_tokens=3)
LARGE = pb.SamplingParams(max_tokens=3000, logprobs=4)  # about 2 MB in memory, 200 KB on the wire
CONFIG = {"page_size": 32, "num_pages": 512}


class Stalled:
    def __init__(self, call: Any, first: pb.GenerateResponse) -> None:
        self._call = call
        self.num_tokens = len(first.token_ids)

    async def read_on(self, pause: float = 0.0) -> None:
        async with asyncio.timeout(60):
            await self._read_on(pause)

    async def _read_on(self, pause: float) -> None:
        num_read = 0
        while (response := await self._call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            self.num_tokens += len(response.token_ids)
            num_read += 1
            await asyncio.sleep(pause if num_read <= 3 else 0)


@contextlib.asynccontextmanager
async def stalled(its: Served, sampling: pb.SamplingParams) -> AsyncIterator[Stalled]:
    channel = its.channel(**NARROW)
    stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
    try:
        call = stub.Generate(pb.GenerateRequest(text="a", sampling=sampling))
        yield Stalled(call, await call.read())
    finally:
        await channel.close(None)


def _unread(its: Served) -> int:
    return its.engine._open._unread.num_bytes


async def test_unread_output_keeps_new_requests_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limiter, "MAX_UNREAD_BYTES", 1_000_000)
    config = small_config(**CONFIG)
    async with served(FakeCore(verify=False), config=config) as its:
        async with stalled(its, LARGE) as slow:
            await eventually(lambda: all_idle(its.engine), "it is computed to its end", within=60)
            assert its.engine.gauges().num_running == 0
            assert _unread(its) > 1_000_000
            with pytest.raises(Overloaded, match="bytes of output are unread by clients"):
                await collect(its.client.generate("b", SHORT))
            await slow.read_on()
            assert slow.num_tokens == 3000
            await eventually(lambda: _unread(its) == 0, "all of it was read")
            assert await collect(its.client.generate("b", SHORT))
        assert _unread(its) == 0


async def test_far_too_much_unread_output_ends_the_slowest_stream_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_limiter, "MAX_UNREAD_BYTES", 300_000)
    config = small_config(**CONFIG)
    async with served(FakeCore(verify=False), config=config) as its:
        honest = asyncio.create_task(collect(its.client.generate([1], SamplingParams(max_tokens=2000))))
        async with stalled(its, LARGE) as slow:
            assert len((await honest)[0].token_ids) == 2000
            await eventually(lambda: all_idle(its.engine), "the slow one was ended", within=60)
            assert _unread(its) < 300_000, "what is in its write, and no more"
            with pytest.raises(grpc.aio.AioRpcError, match="read faster") as caught:
                await slow.read_on()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await eventually(lambda: _unread(its) == 0, "nothing is left of it")


async def test_a_write_that_does_not_move_ends_its_call() -> None:
    config = small_config(**CONFIG)
    async with served(FakeCore(verify=False), config=config, write_timeout_s=0.3) as its:  # noqa: SIM117
        async with stalled(its, LARGE):
            await eventually(lambda: its.server.handler.num_active == 0, "the call was ended", within=60)
            await eventually(lambda: all_idle(its.engine) and _unread(its) == 0, "pages and output are free")
            await eventually(lambda: its.server.limiter.calls.total == 0, "nothing waits for its last word")
            writer = its.server.handler.writer
            assert not writer._writes
            writer.timeout_s = 30.0  # a busy machine must not count as a slow reader
            assert await collect(its.client.generate("b", SHORT)), "others are served"


async def test_a_reader_that_resumes_too_late_gets_the_reason() -> None:
    """The status may be lost on a blocked connection, so one success in several attempts is enough."""
    config = small_config(**CONFIG)
    async with served(FakeCore(verify=False), config=config, write_timeout_s=0.3) as its:
        for _ in range(4):
            async with stalled(its, LARGE) as slow:
                await eventually(lambda: its.server.limiter.calls.total == 0, "the call was ended", within=60)
                try:
                    await asyncio.wait_for(slow.read_on(), 10)
                except TimeoutError:
                    continue
                except grpc.aio.AioRpcError as error:
                    _check_reason(error)
                    return
                raise AssertionError("the call ended as if everything had been read")
    raise AssertionError("no attempt was told why")


def _check_reason(error: grpc.aio.AioRpcError) -> None:
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "has not read its output" in (error.details() or "")
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    info = error_details_pb2.ErrorInfo()
    assert status is not None
    assert status.details[0].Unpack(info)
    assert info.reason == "SLOW_READER"


async def test_an_unread_batch_ends_with_all_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "BATCH_BACKLOG", 2)
    async with served(FakeCore(verify=False), config=small_config(**CONFIG), write_timeout_s=2.0) as its:
        channel = its.channel(**NARROW)
        stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        requests = [
            pb.GenerateRequest(request_id=str(k), token_ids=pb.TokenIds(ids=[k]), sampling=LARGE)
            for k in range(1, 5)
        ]
        call = stub.GenerateMany(iter(requests))
        await call.read()
        await eventually(lambda: its.server.handler.num_active == 4, "all are in")
        await eventually(lambda: its.server.handler.num_active == 0, "the call was ended", within=60)
        await eventually(lambda: all_idle(its.engine) and _unread(its) == 0, "pages and output are free")
        await channel.close(None)


async def test_a_reader_that_is_merely_slow_is_let_alone() -> None:
    config = small_config(**CONFIG)
    server = served(FakeCore(verify=False), config=config, write_timeout_s=10.0)
    async with server as its, stalled(its, LARGE) as slow:
        await slow.read_on(pause=0.5)
        assert slow.num_tokens == 3000


async def test_log_probabilities_that_cannot_be_sent_are_refused_before_they_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_limiter, "MAX_UNREAD_BYTES", prompt_logprobs_bytes(50, 20))
    config = small_config(num_pages=400)
    async with served(FakeCore(verify=False), config=config) as its:
        asked = SamplingParams(max_tokens=2, prompt_logprobs=20)
        assert await collect(its.client.generate([1] * 100, asked))
        steps = its.num_steps
        with pytest.raises(InvalidRequest, match="prompt_logprobs=20 for 101 tokens must take at most"):
            await collect(its.client.generate([1] * 101, asked))
        assert its.num_steps == steps


async def test_a_reader_that_waits_is_not_ended_for_one_large_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limiter, "MAX_UNREAD_BYTES", 1)
    monkeypatch.setattr(output_streams, "MAX_HELD_LIMITS", 2**30)
    config = small_config(**CONFIG)
    gate = Gate()
    async with served(FakeCore(verify=False, before_step=gate), config=config) as its:
        calls = [its.client.stub.Generate(_final(number)) for number in range(4)]
        await eventually(lambda: its.server.handler.num_active == 4, "all are in")
        gate.open()
        found = await asyncio.gather(*(call.read() for call in calls))
        assert all(len(response.token_ids) == 200 for response in found)


def _final(number: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[number]),
        sampling=pb.SamplingParams(max_tokens=200, ignore_eos=True, logprobs=20),
        output_mode=pb.OUTPUT_MODE_FINAL,
    )
