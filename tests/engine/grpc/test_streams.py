from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from engines import Gate, SlowSteps
from fakes import FakeCore, small_config
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.grpc.octavo_v1 import generation
from octavo.proto import generation_pb2 as pb
from octavo.proto import generation_pb2_grpc
from served import Served, all_idle, collect, eventually, served

pytestmark = pytest.mark.server

LONG = SamplingParams(max_tokens=200)


def _few_steps() -> Gate:
    gate = Gate()
    gate.allow(3)
    return gate


async def _freed_early(its: Served, gate: Gate, *, at_most: int = 10) -> None:
    await eventually(lambda: its.server.handler.num_active == 0, "the engine was told")
    gate.open()
    await eventually(lambda: all_idle(its.engine), "pages idle")
    assert its.num_steps <= at_most, f"it ran on for {its.num_steps} steps"


async def test_a_cancelled_call_frees_its_pages() -> None:
    async with served(gate=(gate := _few_steps())) as its:
        deltas = its.client.generate("hello", LONG)
        await anext(deltas)
        assert its.engine.gauges().pages_held > 0
        await deltas.aclose()
        await _freed_early(its, gate)


async def test_a_lost_connection_frees_its_pages() -> None:
    async with served(gate=(gate := _few_steps())) as its:
        channel = its.channel()
        stub = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(max_tokens=200)))
        await call.read()
        await channel.close(None)
        await _freed_early(its, gate)


async def test_a_deadline_ends_the_request() -> None:
    async with served(gate=(gate := _few_steps())) as its:
        call = its.client.stub.Generate(
            pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(max_tokens=200)), timeout=0.1
        )

        async def read() -> None:
            async for _ in call:
                pass

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await _freed_early(its, gate)


async def test_a_client_that_stops_reading_delays_no_other() -> None:
    config = small_config(page_size=32, num_pages=256)
    async with served(FakeCore(verify=False), config=config) as its:
        channel = its.channel(grpc__http2__lookahead_bytes=1024, grpc__http2__bdp_probe=0)
        stub = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(max_tokens=2000)))
        responses = [await call.read()]
        others = await asyncio.gather(
            *(collect(its.client.generate(f"other {i}", SamplingParams(max_tokens=100))) for i in range(4))
        )
        assert [len(other[0].token_ids) for other in others] == [100] * 4
        await eventually(lambda: all_idle(its.engine), "the stalled one is computed to its end", within=60)
        while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            responses.append(response)
        await channel.close(None)
        whole = await collect(its.client.generate("hello", SamplingParams(max_tokens=2000)))
    assert len(responses) < 1000, f"{len(responses)} responses were kept for it"
    assert tuple(token for response in responses for token in response.token_ids) == whole[0].token_ids
    assert "".join(response.text for response in responses) == whole[0].text


async def _many(requests: list[pb.GenerateRequest]) -> AsyncIterator[pb.GenerateRequest]:
    for request in requests:
        yield request


def _small(name: str, text: str, max_tokens: int = 6) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id=name, text=text, sampling=pb.SamplingParams(max_tokens=max_tokens))


async def test_generate_many_answers_all_and_a_bad_one_alone_is_refused() -> None:
    requests = [_small(f"r{index}", f"prompt {index}") for index in range(40)]
    requests[7] = _small("r7", "prompt 7", max_tokens=-1)
    requests[9] = pb.GenerateRequest(request_id="r9")
    async with served() as its:
        responses: dict[str, list[pb.GenerateResponse]] = {}
        async for response in its.client.stub.GenerateMany(_many(requests)):
            responses.setdefault(response.request_id, []).append(response)
        assert sorted(responses) == sorted(request.request_id for request in requests)
        for index, request in enumerate(requests):
            answers = responses[request.request_id]
            if index in (7, 9):
                [answer] = answers
                assert answer.finish_reason == pb.FINISH_REASON_ERROR
                assert answer.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
                assert ("-1" if index == 7 else "prompt") in answer.error.message
                continue
            alone = await collect(its.client.generate(request.text, SamplingParams(max_tokens=6)))
            assert tuple(token for answer in answers for token in answer.token_ids) == alone[0].token_ids
            assert answers[-1].finish_reason == pb.FINISH_REASON_LENGTH
            assert not answers[-1].HasField("error")
        await eventually(lambda: all_idle(its.engine), "pages idle")


async def test_generate_many_computes_only_so_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.grpc.octavo_v1.generation.BATCH_CONCURRENCY", 3)
    async with served(gate=SlowSteps()) as its:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, its.server.handler.num_active)
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        ended = set()
        async for delta in its.client.generate_many(_many([_small(f"r{i}", f"p{i}") for i in range(12)])):
            if delta.finish_reason is FinishReason.LENGTH:
                ended.add(delta.request_id)
        watcher.cancel()
        assert len(ended) == 12
        assert most == 3


async def test_cancelling_generate_many_frees_all_its_pages() -> None:
    async with served(gate=(gate := _few_steps())) as its:
        requests = [_small(f"r{index}", f"prompt {index}", max_tokens=200) for index in range(6)]
        deltas = its.client.generate_many(_many(requests))
        await anext(deltas)
        await deltas.aclose()
        await _freed_early(its, gate)


async def test_generate_many_whose_client_does_not_read_can_still_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "BATCH_BACKLOG", 1)
    async with served(gate=SlowSteps()) as its:
        channel = its.channel(grpc__http2__lookahead_bytes=1024, grpc__http2__bdp_probe=0)
        stub = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        call = stub.GenerateMany(_many([_small(f"r{i}" * 60, f"p{i}", max_tokens=180) for i in range(6)]))
        await call.read()
        await asyncio.sleep(0.1)
        call.cancel()
        await eventually(lambda: all_idle(its.engine), "pages idle")
        await eventually(lambda: its.server.handler.num_active == 0, "nobody is served")
        await channel.close(None)
