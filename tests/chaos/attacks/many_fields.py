"""Messages of a megabyte with as many elements as possible, to all services."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from hostile_messages import hostile
from octavo.proto import cache_pb2, generation_pb2

from ..attack import Attack, Seen, Target, count

SIZE, AT_ONCE = 1 << 20, 4
FILES: tuple[tuple[Any, str], ...] = (
    (generation_pb2, "Generation"),
    (cache_pb2, "Cache"),
    (vllm, "VllmEngine"),
)
ENDLESS = {"FlushCache", "StartProfile", "StopProfile"}


async def attack(target: Target, seen: Seen) -> None:
    messages = [
        (f"/{service.full_name}/{method.name}", content)
        for file, name in FILES
        for service in (file.DESCRIPTOR.services_by_name[name],)
        for method in service.methods
        if method.name not in ENDLESS and not method.client_streaming
        for _, content in hostile(method.input_type, SIZE)
    ]
    rng, end = random.Random(1), time.monotonic() + target.seconds
    async with target.channel() as channel:
        while time.monotonic() < end:
            calls = [
                channel.unary_stream(path, None, None)(content, metadata=target.metadata, timeout=0.5)
                for path, content in rng.sample(messages, AT_ONCE)
            ]
            await asyncio.gather(*(count(seen, call) for call in calls))


ATTACK = Attack(name="many-fields", finding="y01", run=attack)
