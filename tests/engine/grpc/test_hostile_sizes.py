from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from hostile_child import Harness, child
from hostile_messages import field, hostile
from octavo.engine.grpc.call_limiter import END
from octavo.proto import cache_pb2 as cache
from octavo.proto import generation_pb2 as octavo

pytestmark = pytest.mark.server

SIZE = 1 << 20
MAX_GROWTH = 4
RECEIVED = field(9999, b"a" * SIZE)
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
VALID: dict[str, Message] = {
    "GenerateRequest": octavo.GenerateRequest(text="a"),
    "vllm.GenerateRequest": vllm.GenerateRequest(text="a"),
    "EmbedRequest": octavo.EmbedRequest(text="a"),
    "RerankRequest": octavo.RerankRequest(query="a", documents=["a"], yes="y", no="n"),
    "TokenizeRequest": octavo.TokenizeRequest(text="a"),
    "PinRequest": cache.PinRequest(name="a", prefix=cache.Prefix(text="a")),
    "SaveRequest": cache.SaveRequest(path="a"),
}


def cases(services: Iterable[ServiceDescriptor]) -> Iterator[tuple[str, str, bool, bytes]]:
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
    ids = octavo.TokenIds(ids=[1] * (SIZE + 1))
    many_ids = octavo.GenerateRequest(token_ids=ids).SerializeToString()
    yield "Generate: ids of one byte", "/octavo.v1.Generation/Generate", False, many_ids
    many = octavo.RerankRequest(query="q" * SIZE, documents=["d"] * MANY, yes="y", no="n")
    yield "Rerank: query times documents", "/octavo.v1.Generation/Rerank", False, many.SerializeToString()
    many = octavo.RerankRequest(query="q", documents=["d"] * MANY, template="{query}{document}" + "t" * SIZE)
    yield "Rerank: template times documents", "/octavo.v1.Generation/Rerank", False, many.SerializeToString()


async def call(channel: grpc.aio.Channel, path: str, streams: bool, data: bytes) -> str:
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


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "services",
    [SERVICES[:1], pytest.param(SERVICES[1:2], marks=pytest.mark.slow), SERVICES[2:]],
    ids=["Generation", "VllmEngine", "others"],
)
async def test_nothing_costs_much_before_its_limits(
    services: tuple[ServiceDescriptor, ...], tmp_path: Path
) -> None:
    async with (
        child(tmp_path) as server,
        grpc.aio.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)]) as channel,
    ):
        harness = Harness(server)
        more = products() if SERVICES[0] in services else ()
        info = functools.partial(call, channel, "/octavo.v1.Generation/GetModelInfo", False, RECEIVED)
        await harness.begin(info)
        wrong = {
            name: found
            for name, path, streams, message in itertools.chain(cases(services), more)
            if (
                found := await harness.excess(
                    functools.partial(call, channel, path, streams, message), size=SIZE, most=MAX_GROWTH
                )
            )
        }
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())


def test_hostile_messages_have_the_intended_sizes() -> None:
    described: Any = octavo.GenerateRequest.DESCRIPTOR
    named = dict(hostile(described, 1000))
    parse: Any = octavo.GenerateRequest.FromString
    assert len(parse(named["chat.messages many empty"]).chat.messages) == 500
    assert parse(named["text long"]).text == "a" * 1000
    assert len(parse(named["sampling.logit_bias many keys"]).sampling.logit_bias) == 83
    assert len(parse(named["token_ids.ids packed"]).token_ids.ids) == 500
    assert all(500 < len(content) < 1500 for content in named.values())
