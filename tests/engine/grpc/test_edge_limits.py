from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from grpc_status import rpc_status
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from engines import Gate
from fakes import FakeCore, small_config
from http2_frames import HEADERS, RESET, Connection, message, reset
from http2_frames import call as http2_call
from octavo.engine.api.address import Address
from octavo.engine.api.errors import InvalidRequest, Overloaded
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.tenant import NO_TENANT
from octavo.engine.frontend.input_processor import LONG_TEXT
from octavo.engine.grpc import call_limiter
from octavo.engine.grpc import server as grpc_server
from octavo.engine.grpc.call_limiter import END
from octavo.engine.grpc.octavo_v1 import messages
from octavo.engine.grpc.security import Security
from octavo.engine.grpc.server import message_bytes
from octavo.engine.grpc.tokenization import TEXT_LENGTHS
from octavo.engine.tokenizer.tokenizer import Tokenizer
from octavo.proto import cache_pb2, cache_pb2_grpc, generation_pb2_grpc
from octavo.proto import generation_pb2 as pb
from served import Served, collect, eventually, served
from vllm_worker import ask

pytestmark = pytest.mark.server

SHORT = SamplingParams(max_tokens=3)
MODEL_LEN = 4096
MIB = 2**20


class Proxy:
    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self.num_sent = 0
        self.address = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        tasks: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await asyncio.gather(
                    self._pass(reader, far_writer, counts=True), self._pass(far_reader, writer, counts=False)
                )
            for each in (far_writer, writer):
                each.close()

        listener = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            listener.close()
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool
    ) -> None:
        while data := await reader.read(65536):
            self.num_sent += len(data) if counts else 0
            writer.write(data)
            await writer.drain()
        writer.close()


async def test_the_body_of_a_call_without_a_token_is_not_received(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice alice-0123456789\n")
    large = 40 * MIB
    async with (
        served(security=Security(token_file=tokens), max_message_bytes=64 * MIB) as its,
        Proxy(its.address).running() as proxy,
        grpc.aio.insecure_channel(proxy.address, options=[("grpc.max_send_message_length", -1)]) as channel,
    ):
        own: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        routers: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        body = "x" * large
        calls: tuple[Callable[[], Any], ...] = (
            lambda: own.Tokenize(pb.TokenizeRequest(text=body)),
            lambda: own.Generate(pb.GenerateRequest(text=body)).read(),
            lambda: routers.Generate(ask(text=body)).read(),
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        # gRPC flow control lets about 10 MiB of each body through; the three bodies are 120 MiB.
        assert proxy.num_sent < 2 * large, f"{proxy.num_sent} bytes were taken in"


async def test_a_message_may_be_as_large_as_the_models_length_needs() -> None:
    assert message_bytes(MODEL_LEN) == 8 * MODEL_LEN + MIB
    async with served() as its:
        with pytest.raises(Overloaded, match="larger than max"):
            await its.client.tokenize("x" * (message_bytes(MODEL_LEN) + 1))
        assert await its.client.tokenize("x" * 5000) == [ord("x")] * 5000
    async with served(max_message_bytes=1000) as its:
        with pytest.raises(Overloaded, match="larger than max"):
            await its.client.tokenize("x" * 5000)


async def test_prompts_that_can_never_fit_are_refused_before_they_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served() as its, its.channel() as channel:
        longest = its.engine.tokenizer.longest_token
        routers: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        monkeypatch.setattr(its.engine.tokenizer, "_backend", None)
        ids = [1] * (MODEL_LEN + 1)
        chat = pb.Chat(messages=[pb.ChatMessage(role="user")] * (MODEL_LEN + 1))
        for request, message in (
            (pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids)), "prompt of 4097 tokens"),
            (pb.GenerateRequest(chat=chat), "4097 messages"),
            (pb.GenerateRequest(text="x" * (MODEL_LEN * longest + 1)), "at least 4097 tokens"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
                await its.client.stub.Generate(request).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="prompt of 4097 tokens"):
            await routers.Generate(ask(ids=ids)).read()


async def test_text_calls_have_a_bound_of_their_own() -> None:
    async with served(max_message_bytes=8 * MIB) as its:
        longest = TEXT_LENGTHS * MODEL_LEN
        assert len(await its.client.detokenize([120] * longest)) == longest
        for refused, message in (
            (its.client.detokenize([120] * (longest + 1)), f"at most {longest} "),
            (its.client.tokenize("x" * (longest * its.engine.tokenizer.longest_token + 1)), "at least"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                await refused


async def test_text_calls_and_prompts_wait_for_nothing_that_others_keep_busy() -> None:
    door = threading.Event()
    busy: list[asyncio.Task[bool]] = []
    async with served(config=small_config(num_pages=2000)) as its:
        loop = asyncio.get_running_loop()
        blockers = [loop.run_in_executor(None, door.wait, 60) for _ in range(64)]
        try:
            assert await asyncio.wait_for(its.client.tokenize("ab"), 30) == [97, 98]
            assert await asyncio.wait_for(its.client.detokenize([97, 98]), 30) == "ab"
            its.server.handler.texts.pending.limit = 3
            busy += [
                asyncio.create_task(its.server.handler.texts.run(NO_TENANT, door.wait, 60)) for _ in range(3)
            ]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="3 calls to convert text"):
                await its.client.tokenize("ab")
            for prompt in ("x" * (LONG_TEXT + 1), [{"role": "user", "content": "x"}]):
                whole = await asyncio.wait_for(collect(its.client.generate(prompt, SHORT)), 30)
                assert len(whole[0].token_ids) == 3
        finally:
            door.set()
        await asyncio.gather(*blockers, *busy)


async def test_a_request_counts_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    door, started = threading.Event(), threading.Semaphore(0)
    encode = Tokenizer.encode
    num_encoded = 0

    def slow(self: Tokenizer, text: str, **options: Any) -> list[int]:
        nonlocal num_encoded
        num_encoded += 1
        started.release()
        assert door.wait(60)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    config = small_config(max_running=2, max_waiting=3, num_pages=4000)
    async with served(config=config) as its:
        long = "x" * (LONG_TEXT + 1)
        admitted = [asyncio.create_task(collect(its.client.generate(long, SHORT))) for _ in range(5)]
        await eventually(lambda: its.engine._open.limiter._num_samples == 5, "five are on their way in")
        refused = await asyncio.gather(
            *(collect(its.client.generate(long, SHORT)) for _ in range(20)), return_exceptions=True
        )
        assert all(isinstance(error, Overloaded) for error in refused), refused
        door.set()
        for whole in await asyncio.gather(*admitted):
            assert len(whole[0].token_ids) == 3
    assert num_encoded == 5, "nothing was encoded of what was refused"
    assert its.engine._open.limiter._num_samples == its.engine._open.limiter._num_entering_tokens == 0


async def test_calls_beyond_the_limit_are_refused_with_a_time_to_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_server, "MAX_OTHER_CALLS", 1)
    gate = Gate()
    config = small_config(max_running=1, max_waiting=1)
    async with served(FakeCore(before_step=gate), config=config) as its:
        calls = [its.client.stub.Generate(pb.GenerateRequest(text=text)) for text in "ab"]
        await eventually(lambda: its.server.handler.num_active == 2, "both are in")
        batch = its.client.stub.GenerateMany()
        await eventually(lambda: _num_calls(its) == 3, "the batch is in")
        with pytest.raises(grpc.aio.AioRpcError, match="3 calls are being served, but at most 3") as caught:
            await its.client.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
        retry = error_details_pb2.RetryInfo()
        assert status is not None
        assert status.details[1].Unpack(retry)
        await _check_health(its)
        batch.cancel()
        await eventually(lambda: _num_calls(its) == 2, "the batch has left")
        assert (await its.client.model_info()).name == "fake"
        for call in calls:
            call.cancel()
        gate.open()
        await eventually(lambda: _num_calls(its) == 0, "all have left")


def _num_calls(its: Served) -> int:
    return its.server.limiter.calls.total


async def _check_health(its: Served) -> None:
    async with its.channel() as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_request_ids_cannot_break_the_lines_of_a_log() -> None:
    async with served() as its:
        for request_id in ("a\nERROR forged", "a\r", "\x1b[2J", "a\u2028b"):
            with pytest.raises(InvalidRequest, match="cannot be printed") as caught:
                await collect(its.client.generate("x", SHORT, request_id=request_id))
            assert "\n" not in str(caught.value)
        assert await collect(its.client.generate("x", SHORT, request_id="Grüße, 漢字 1"))


@pytest.mark.parametrize(
    ("host", "with_tokens", "warns"),
    [
        ("0.0.0.0", False, True),
        ("0.0.0.0", True, False),
        ("127.0.0.1", False, False),
        ("localhost", False, False),
    ],
)
def test_an_open_listener_without_tokens_warns_once(
    host: str, with_tokens: bool, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice alice-0123456789\n")
    security = Security(token_file=tokens if with_tokens else None)
    with caplog.at_level(logging.WARNING):
        security.warn_of_strangers(Address(host, 50051))
    assert [record.message for record in caplog.records if "anyone who can reach" in record.message] == (
        [caplog.records[0].message] if warns else []
    )


async def test_a_call_without_its_message_is_counted_and_ended() -> None:
    """The HTTP/2 frames are written by hand, because client libraries always send a message."""
    async with served(write_timeout_s=0.3) as its:
        connection = await Connection.open(its.address)
        paths = ("/octavo.v1.Generation/Generate", "/octavo.v1.Generation/Tokenize")
        await connection.send(b"".join(http2_call(2 * at + 1, path) for at, path in enumerate(paths)))
        await eventually(lambda: _num_calls(its) == 2, "both are counted though nothing of them has come")
        await eventually(lambda: _num_calls(its) == 0, "both were ended")
        await eventually(lambda: connection.seen.get(HEADERS, 0) == 2, "both were told")
        await connection.close()


async def test_nothing_is_done_for_a_call_that_was_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def model_info(*_: object) -> object:
        nonlocal asked
        asked += 1
        raise AssertionError("somebody asked")

    monkeypatch.setattr(messages, "model_info_message", model_info)
    async with served() as its:
        connection = await Connection.open(its.address)
        path = "/octavo.v1.Generation/GetModelInfo"
        for stream in range(1, 401, 2):
            await connection.send(http2_call(stream, path) + reset(stream) + message(stream, b""))
        await its.client.tokenize("that one is answered after them")
        await eventually(lambda: _num_calls(its) == 0, "none is left")
        await connection.close()
    assert asked == 0


async def test_calls_of_one_tenant_leave_places_for_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(grpc_server, "MAX_OTHER_CALLS", 2)
    tokens = tmp_path / "tokens"
    tokens.write_text("alice alice-0123456789\nmallory mallory-0123456789\n")
    config = small_config(max_running=1, max_waiting=1)
    async with served(config=config, security=Security(token_file=tokens)) as its:
        mallory, alice = ([("authorization", f"Bearer {name}-0123456789")] for name in ("mallory", "alice"))
        idle = [its.client.stub.GenerateMany(metadata=mallory) for _ in range(5)]
        await eventually(lambda: _num_calls(its) == 2, "half of the places are taken")
        await eventually(lambda: sum(call.done() for call in idle) == 3, "the others were refused")
        codes = {await call.code() for call in idle if call.done()}
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        reply = await its.client.stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=alice)
        assert list(reply.token_ids) == [97]
        for call in idle:
            call.cancel()


async def test_streams_of_health_have_a_bound_and_checks_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limiter, "MAX_HEALTH_CALLS", 3)
    async with served() as its, its.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(5)]
        answers = await asyncio.gather(*(watch.read() for watch in watches), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert [error.code() for error in refused] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
        await _check_health(its)
        for watch in watches:
            watch.cancel()
        await eventually(lambda: its.server.limiter.health_calls.total == 0, "none is left")


async def test_a_batch_with_nothing_to_do_is_ended() -> None:
    gate = Gate()
    async with served(FakeCore(before_step=gate), write_timeout_s=0.3) as its, its.channel() as channel:
        busy, idle = (its.client.stub.GenerateMany() for _ in range(2))
        await busy.write(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=2)))
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        for call in (idle, reflection):
            with pytest.raises(grpc.aio.AioRpcError, match=r"was idle for|must arrive within"):
                await asyncio.wait_for(call.read(), 20)
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not busy.done(), "it waits for what it asked for"
        gate.open()
        assert (await busy.read()).token_ids
        await busy.done_writing()
        while await asyncio.wait_for(busy.read(), 20) is not END:
            pass
        assert await busy.code() is grpc.StatusCode.OK


async def test_every_holder_is_counted_until_it_lets_go() -> None:
    gate = Gate()
    config = small_config(max_pinned_pages=8)
    async with served(FakeCore(before_step=gate), config=config) as its, its.channel() as channel:
        counts = its.server.held
        gate.allow(4)
        assert await collect(its.client.generate("x" * 8, SamplingParams(max_tokens=2)))
        await its.client.cache.pin("a", cache_pb2.Prefix(text="x" * 8))
        await eventually(lambda: counts()["pinned_pages"] == 2, "two pages are pinned")
        watch = cache_pb2_grpc.CacheStub(channel).Watch(  # type: ignore[no-untyped-call]
            cache_pb2.WatchRequest()
        )
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await asyncio.gather(watch.read(), health.read())
        asked = its.client.stub.Generate(pb.GenerateRequest(text="abcdefgh"))
        await eventually(lambda: gate.is_waiting, "its step has begun")
        await eventually(lambda: bool(counts()["sequences"]), "the engine has it")
        held = {kind for kind, count in counts().items() if count}
        assert held >= {"calls", "watchers", "health_calls", "requests", "streams", "sequences"}
        gate.allow(1)
        await asked.read()
        await eventually(lambda: counts()["pages"] > 0, "it has pages")
        for call in (watch, health, asked):
            call.cancel()
        gate.open()
        await its.client.cache.unpin("a")
        await eventually(lambda: not any(counts().values()), "nobody holds anything")


async def test_a_connection_has_so_many_streams_however_fast_it_resets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, intercept = 0, call_limiter._Admission.intercept_service

    async def counting(self: call_limiter._Admission, *arguments: Any) -> Any:
        nonlocal seen
        seen += 1
        return await intercept(self, *arguments)

    monkeypatch.setattr(call_limiter._Admission, "intercept_service", counting)
    async with served() as its:
        connection = await Connection.open(its.address)
        path, most = "/octavo.v1.Generation/Generate", grpc_server.MAX_CONNECTION_CALLS
        for first in range(1, 10 * most, 400):
            streams = range(first, first + 400, 2)
            await connection.send(b"".join(http2_call(at, path) + reset(at) for at in streams))
        await eventually(lambda: connection.seen.get(RESET, 0) > most, "many were refused by gRPC itself")
        assert await its.client.tokenize("a") == [97], "others are served"
        await connection.close()
    assert seen < 2 * most, f"{seen} of {5 * most} came through"
