"""What a call costs before its limits: each RPC is called with messages that have as much as possible of one
thing, of every field."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

import hostile_server
from hostile_messages import field, hostile
from octavo.engine.grpc.call_limiter import END
from octavo.proto import cache_pb2 as cache
from octavo.proto import generation_pb2 as octavo

pytestmark = pytest.mark.server

SIZE = 1 << 20  # of a message
MAX_LOOP_MS = 5.0
MAX_GROWTH = 4 * SIZE
TRIES = 10  # of which the best counts: a first use has costs of its own
RECEIVED = field(9999, b"a" * SIZE)  # an unknown field: what receiving a message takes, whatever is in it
SERVICES: tuple[ServiceDescriptor, ...] = tuple(
    file.DESCRIPTOR.services_by_name[name]
    for file, name in (
        (octavo, "Generation"),
        (vllm, "VllmEngine"),
        (cache, "Cache"),
        (health_pb2, "Health"),
        (reflection_pb2, "ServerReflection"),
    )
)
MANY = 1000
VALID: dict[str, Message] = {  # requests that would be served, to which something hostile is added
    "GenerateRequest": octavo.GenerateRequest(text="a"),
    "vllm.GenerateRequest": vllm.GenerateRequest(text="a"),
    "EmbedRequest": octavo.EmbedRequest(text="a"),
    "RerankRequest": octavo.RerankRequest(query="a", documents=["a"], yes="y", no="n"),
    "TokenizeRequest": octavo.TokenizeRequest(text="a"),
    "PinRequest": cache.PinRequest(name="a", prefix=cache.Prefix(text="a")),
    "SaveRequest": cache.SaveRequest(path="a"),
}


class Child:
    """The measured server, in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self._process = process
        self.address = address

    async def ask(self, word: str) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(word.encode() + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), 60)
        found: dict[str, float] = json.loads(line)
        return found


@asynccontextmanager
async def child(preload: Path) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(hostile_server.__file__)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={
            "PYTHONPATH": str(Path(hostile_server.__file__).parent),
            "LD_PRELOAD": str(preload),
            "PYTHONMALLOC": "malloc",  # Python's own allocator would not be counted
        },
    )
    try:
        assert process.stdout is not None
        yield Child(process, (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip())
    finally:
        process.kill()
        await process.wait()


def cases(services: Iterable[ServiceDescriptor]) -> Iterator[tuple[str, str, bool, bytes]]:
    """Name, method, whether its requests are a stream, and message."""
    for service in services:
        for method in service.methods:
            path = f"/{service.full_name}/{method.name}"
            described: Descriptor = method.input_type
            package = service.full_name.split(".")[0]
            valid = VALID.get(f"{package}.{described.name}", VALID.get(described.name))
            begin = b"" if valid is None else valid.SerializeToString()
            for name, content in hostile(described, SIZE):
                yield f"{method.name}: {name}", path, method.client_streaming, begin + content


def products() -> Iterator[tuple[str, str, bool, bytes]]:
    """Messages that something multiplies: two long parts, and ids that take one byte."""
    ids = octavo.TokenIds(ids=[1] * (SIZE + 1))
    many_ids = octavo.GenerateRequest(token_ids=ids).SerializeToString()
    yield "Generate: ids of one byte", "/octavo.v1.Generation/Generate", False, many_ids
    many = octavo.RerankRequest(query="q" * SIZE, documents=["d"] * MANY, yes="y", no="n")
    yield "Rerank: query times documents", "/octavo.v1.Generation/Rerank", False, many.SerializeToString()
    many = octavo.RerankRequest(query="q", documents=["d"] * MANY, template="{query}{document}" + "t" * SIZE)
    yield "Rerank: template times documents", "/octavo.v1.Generation/Rerank", False, many.SerializeToString()


async def call(channel: grpc.aio.Channel, path: str, streams: bool, data: bytes) -> str:
    """Make a call and read the beginning of what it answers; the status, or OK."""
    made: Any = (
        channel.stream_stream(path, None, None)(iter([data]), timeout=20)
        if streams
        else channel.unary_stream(path, None, None)(data, timeout=20)
    )
    try:
        answer = await asyncio.wait_for(made.read(), 20)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    finally:
        made.cancel()
    return "OK" if answer is not END else (await made.code()).name


class Harness:
    """Calls methods of a measured server, and says what took too much before its limits."""

    def __init__(self, server: Child, channel: grpc.aio.Channel) -> None:
        self._server = server
        self._channel = channel
        self._receiving_ms = 0.0

    async def begin(self) -> None:
        """Measure what receiving alone takes."""
        path = "/octavo.v1.Generation/GetModelInfo"
        reports = [(await self._measure(path, False, RECEIVED))[1] for _ in range(TRIES)]
        self._receiving_ms = min(report["loop_ms"] for report in reports)

    async def excess(self, path: str, streams: bool, data: bytes) -> str:
        """What was too much in the best of some tries; empty if nothing was."""
        wrong = ""
        for _ in range(TRIES):
            status, report = await self._measure(path, streams, data)
            loop_ms = report["loop_ms"] - self._receiving_ms
            if loop_ms <= MAX_LOOP_MS and report["growth"] <= MAX_GROWTH:
                return ""
            times = report["growth"] / SIZE
            wrong = f"{loop_ms:.1f} ms on the event loop, {times:.1f} times the message ({status:.80})"
        return wrong

    async def _measure(self, path: str, streams: bool, data: bytes) -> tuple[str, dict[str, float]]:
        await self._server.ask("begin")
        status = await call(self._channel, path, streams, data)
        return status, await self._server.ask("end")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "services",
    [SERVICES[:1], pytest.param(SERVICES[1:2], marks=pytest.mark.slow), SERVICES[2:]],
    ids=["Generation", "VllmEngine", "others"],
)
async def test_nothing_costs_much_before_its_limits(
    services: tuple[ServiceDescriptor, ...], tmp_path: Path
) -> None:
    preload = tmp_path / "counted_allocations.so"
    source = Path(hostile_server.__file__).with_name("counted_allocations.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", preload, source], check=True)
    async with (
        child(preload) as server,
        grpc.aio.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)]) as channel,
    ):
        harness = Harness(server, channel)
        more = products() if SERVICES[0] in services else ()
        await harness.begin()
        wrong = {
            name: found
            for name, path, streams, data in itertools.chain(cases(services), more)
            if (found := await harness.excess(path, streams, data))
        }
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())


def test_hostile_messages_are_what_they_say() -> None:
    described: Any = octavo.GenerateRequest.DESCRIPTOR
    named = dict(hostile(described, 1000))
    parse: Any = octavo.GenerateRequest.FromString
    assert len(parse(named["chat.messages many empty"]).chat.messages) == 500
    assert parse(named["text long"]).text == "a" * 1000
    assert len(parse(named["sampling.logit_bias many keys"]).sampling.logit_bias) == 83
    assert len(parse(named["token_ids.ids packed"]).token_ids.ids) == 500
    assert all(500 < len(content) < 1500 for content in named.values())
