from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from engines import Gate
from fakes import VOCAB_SIZE, FakeCore, small_config
from octavo.engine.api.errors import EngineDead, InvalidRequest, RequestFailed
from octavo.engine.api.sampling_params import SamplingParams
from octavo.proto import generation_pb2 as pb
from served import Served, all_idle, collect, eventually, served

pytestmark = pytest.mark.server

INVALID = grpc.StatusCode.INVALID_ARGUMENT
POISON = 7


def _request(**changes: Any) -> pb.GenerateRequest:
    sampling = changes.pop("sampling", {})
    if not changes.keys() & {"text", "token_ids", "chat", "no_prompt"}:
        changes["text"] = "hello"
    changes.pop("no_prompt", None)
    return pb.GenerateRequest(sampling=pb.SamplingParams(**sampling), **changes)


MALFORMED = {
    "no prompt": (_request(no_prompt=True), "text, token_ids and chat"),
    "empty text": (_request(text=""), "empty"),
    "empty ids": (_request(token_ids=pb.TokenIds()), "empty"),
    "chat without messages": (_request(chat=pb.Chat()), "no messages"),
    "reserved variable": (
        _request(chat=pb.Chat(messages=[pb.ChatMessage(role="user")], template_variables='{"tools": []}')),
        "chat.template_variables.tools must be left out",
    ),
    "message without role": (_request(chat=pb.Chat(messages=[pb.ChatMessage(content="x")])), "no role"),
    "id outside the vocabulary": (_request(token_ids=pb.TokenIds(ids=[1, VOCAB_SIZE])), str(VOCAB_SIZE)),
    "prompt longer than the pool": (_request(token_ids=pb.TokenIds(ids=[1] * 257)), "257"),
    "output longer than the pool": (_request(sampling={"max_tokens": 252}), "252"),
    "max_tokens 0": (_request(sampling={"max_tokens": 0}), "max_tokens"),
    "temperature negative": (_request(sampling={"temperature": -0.1}), "temperature"),
    "top_p 0": (_request(sampling={"top_p": 0.0}), "top_p"),
    "logit bias": (_request(sampling={"logit_bias": {5: 1000.0}}), "logit_bias"),
    "logit bias outside": (_request(sampling={"logit_bias": {5000: 1.0}}), "5000"),
    "n too many": (_request(sampling={"n": 1000}), "1000"),
    "empty stop string": (_request(sampling={"stop": [""]}), "stop"),
    "stop id outside": (_request(sampling={"stop_ids": [100_000]}), "100000"),
    "logprobs too many": (_request(sampling={"logprobs": 500}), "500"),
    "earlier output negative": (_request(sampling={"num_output_tokens": -1}), "num_output_tokens"),
    "earlier output without a prompt": (_request(sampling={"num_output_tokens": 5}), "less than the number"),
    "unknown output mode": (_request(output_mode=17), "output_mode 17"),
    "request id too long": (_request(request_id="x" * 300), "300"),
}


async def test_malformed_requests_of_every_kind() -> None:
    async with served() as its:
        for name, (request, hint) in MALFORMED.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _drain(its, request)
            error = caught.value
            assert error.code() is INVALID, f"{name}: {error}"
            text = error.details() or ""
            assert hint in text, f"{name}: {text}"
            assert "Traceback" not in text
            assert "\n" not in text
            status = _status(error)
            bad = error_details_pb2.BadRequest()
            assert status.details[0].Unpack(bad), name
            assert bad.field_violations[0].description == text
        whole = await collect(its.client.generate("hello", SamplingParams(max_tokens=4)))
        assert len(whole[0].token_ids) == 4
        await eventually(lambda: all_idle(its.engine), "every page idle")


async def test_wrong_unary_requests() -> None:
    async with served() as its:
        for method, request in (
            (its.client.stub.Tokenize, pb.TokenizeRequest()),
            (its.client.stub.Tokenize, pb.TokenizeRequest(chat=pb.Chat())),
            (its.client.stub.Detokenize, pb.DetokenizeRequest(token_ids=[VOCAB_SIZE])),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(request)
            assert caught.value.code() is INVALID


async def test_a_full_server_refuses_with_resource_exhausted() -> None:
    config = small_config(max_running=1, max_waiting=1)
    async with served(gate=Gate(), config=config) as its:
        streams = [its.client.generate("hello", SamplingParams()) for _ in range(2)]
        firsts = [asyncio.create_task(anext(stream)) for stream in streams]
        await eventually(lambda: its.server.handler.num_active == 2, "both are in")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _drain(its, _request())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = _status(caught.value)
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert (info.reason, info.domain) == ("OVERLOADED", "octavo")
        assert info.metadata == {"unfinished_requests": "2", "max_unfinished_requests": "2"}
        retry = error_details_pb2.RetryInfo()
        assert status.details[1].Unpack(retry)
        assert retry.retry_delay.seconds == 1
        for first in firsts:
            first.cancel()
        await asyncio.wait(firsts)


async def test_a_request_that_fails_alone_ends_with_internal_and_its_error() -> None:
    async with served(FakeCore(poison=POISON)) as its:
        good = asyncio.create_task(collect(its.client.generate([1, 2, 3], SamplingParams(max_tokens=50))))
        call = its.client.stub.Generate(_request(token_ids=pb.TokenIds(ids=[1, POISON])))
        responses: list[pb.GenerateResponse] = []

        async def read() -> None:
            async for response in call:
                responses.append(response)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read()
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert responses[-1].finish_reason == pb.FINISH_REASON_ERROR
        assert responses[-1].error.code == grpc.StatusCode.INTERNAL.value[0]
        assert responses[-1].error.message in (caught.value.details() or "")
        assert len((await good)[0].token_ids) == 50
        with pytest.raises(RequestFailed):
            await collect(its.client.generate([POISON], SamplingParams(max_tokens=1)))


async def test_an_unforeseen_error_shows_nothing_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as its:

        def explode(*_: object, **__: object) -> None:
            raise ZeroDivisionError("secret of the house")

        monkeypatch.setattr(its.engine, "generate", explode)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _drain(its, _request())
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in (caught.value.details() or "")
        status = _status(caught.value)
        assert "secret" not in str(status)


async def test_a_missing_server_is_reported_with_a_remedy() -> None:
    from octavo.engine.client.client import Client

    async with Client("127.0.0.1:1") as client:
        with pytest.raises(EngineDead, match=r"127\.0\.0\.1:1.*octavo serve"):
            await client.model_info()


def _status(error: grpc.aio.AioRpcError) -> Any:
    status = rpc_status.from_call(cast(grpc.Call, error))
    assert status is not None, "no details came"
    return status


async def _drain(its: Served, request: pb.GenerateRequest) -> None:
    async for _ in its.client.stub.Generate(request):
        pass


async def test_a_long_refusal_arrives_with_its_status() -> None:
    """Clients turn a status with more than 8 KiB of headers into RESOURCE_EXHAUSTED, and then retry."""
    long = "x" * 100_000
    async with served() as its:
        asks = (
            _request(sampling={"speculate": long}),
            _request(request_id=long),
            _request(sampling={"structured": {"regex": "(" + "a" * 20_000}}),
        )
        for request in asks:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _drain(its, request)
            assert caught.value.code() is INVALID, caught.value.details()
            assert len(caught.value.details() or "") <= 2010
        rerank = pb.RerankRequest(query="q", documents=["d"], yes="y" * 200_000, no="n")
        with pytest.raises(InvalidRequest, match="yes must be one token"):
            await its.client.unary(its.client.stub.Rerank, rerank)
