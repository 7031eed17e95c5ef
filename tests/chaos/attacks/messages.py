"""gRPC messages that are large, or have as many elements as possible."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import grpc.aio
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from hostile_messages import field, hostile
from octavo.proto import cache_pb2, generation_pb2
from octavo.proto import generation_pb2 as pb

from ..attack import SERVICE, Seen, Target, attack, count, count_all, repeat

MIB = 2**20
IDS = 8_000_000
UNAUTHENTICATED_BYTES = 32 * MIB
SERVICES: tuple[tuple[Any, str], ...] = (
    (generation_pb2, "Generation"),
    (cache_pb2, "Cache"),
    (vllm, "VllmEngine"),
)
ENDLESS = {"FlushCache", "StartProfile", "StopProfile"}


def _raw(channel: grpc.aio.Channel, method: str) -> Any:
    make: Any = channel.unary_stream if method == "Generate" else channel.unary_unary
    return make(SERVICE + method)


@attack("giant-texts", "A3")
async def send_giant_texts(target: Target, seen: Seen) -> None:
    text = "the quick brown fox jumps over a lazy dog, " * (MIB // 43)
    options: dict[str, Any] = {"metadata": target.metadata, "timeout": 20}
    async with target.generation() as stub:
        for each in (text, text * 4):
            chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=each)])
            requests = pb.GenerateRequest(text=each), pb.GenerateRequest(chat=chat)
            await count_all(seen, [stub.Generate(request, **options) for request in requests])
            request = pb.TokenizeRequest(text=each)
            await count_all(seen, [stub.Tokenize(request, **options) for _ in range(2)])


@attack("giant-ids", "A6")
async def send_giant_ids(target: Target, seen: Seen) -> None:
    ids = field(1, b"\x05" * IDS)
    async with target.channel() as channel:
        for _ in range(2):
            bodies = (("Generate", field(3, ids)), ("Detokenize", ids))
            calls = [
                _raw(channel, method)(body, metadata=target.metadata, timeout=20) for method, body in bodies
            ]
            await count_all(seen, calls)


@attack("unauthenticated", "A6")
async def send_without_a_token(target: Target, seen: Seen) -> None:
    """Send large bodies without a valid token; the server refuses them before it receives them."""
    body = field(2, b"a" * UNAUTHENTICATED_BYTES)
    wrong = (("authorization", "Bearer not-a-token-of-this-server"),)

    async def one(number: int) -> None:
        async with target.channel() as channel:
            method = _raw(channel, "Generate" if number < 2 else "Tokenize")
            await count(seen, method(body, metadata=wrong if number % 2 else (), timeout=20))

    for _ in range(2):
        await asyncio.gather(*(one(number) for number in range(4)))


@attack("rerank-copies", "y01")
async def rerank(target: Target, seen: Seen) -> None:
    """Rerank a thousand documents with a query or template of a megabyte."""
    long, many = 900 << 10, 1000
    documents = ["d"] * many
    requests = [pb.RerankRequest(query="q" * long, documents=documents)] * 4 + [
        pb.RerankRequest(query="q", documents=documents, template="{query}{document}" + "t" * long),
        pb.RerankRequest(query="q", documents=documents, yes="y" * long),
        pb.RerankRequest(query="q", documents=["d" * (long // many)] * many, yes="a", no="b"),
    ]

    async def call(stub: Any, *_: Any) -> None:
        await count_all(seen, [stub.Rerank(each, metadata=target.metadata, timeout=20) for each in requests])

    await repeat(target, 1, call)


@attack("many-fields", "y01")
async def send_many_fields(target: Target, seen: Seen) -> None:
    messages = [
        (f"/{service.full_name}/{method.name}", content)
        for file, name in SERVICES
        for service in (file.DESCRIPTOR.services_by_name[name],)
        for method in service.methods
        if method.name not in ENDLESS and not method.client_streaming
        for _, content in hostile(method.input_type, MIB)
    ]
    rng, end = random.Random(1), time.monotonic() + target.seconds
    async with target.channel() as channel:
        while time.monotonic() < end:
            calls = [
                channel.unary_stream(path, None, None)(content, metadata=target.metadata, timeout=0.5)
                for path, content in rng.sample(messages, 4)
            ]
            await count_all(seen, calls)
