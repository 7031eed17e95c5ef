"""Large bodies from callers without a token; the server refuses them before it receives them."""

from __future__ import annotations

import asyncio

from hostile_messages import field

from ..attack import Attack, Seen, Target, count
from .giant_ids import raw

BODY = 32 * 2**20


async def attack(target: Target, seen: Seen) -> None:
    body = field(2, b"a" * BODY)
    wrong = (("authorization", "Bearer not-a-token-of-this-server"),)

    async def one(number: int) -> None:
        metadata = wrong if number % 2 else ()
        async with target.channel() as channel:
            method = raw(channel, "Generate" if number < 2 else "Tokenize")
            await count(seen, method(body, metadata=metadata, timeout=20))

    for _ in range(2):
        await asyncio.gather(*(one(number) for number in range(4)))


ATTACK = Attack(name="unauthenticated", finding="A6", run=attack)
