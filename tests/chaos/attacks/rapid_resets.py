"""Thousands of streams that are opened and reset at once."""

from __future__ import annotations

import asyncio

from ..attack import Attack, Seen, Target, count, request_of

ROUNDS, AT_ONCE = 3, 1500


async def attack(target: Target, seen: Seen) -> None:
    request = request_of("reset " * 50, max_tokens=8)
    async with target.generation() as stub:
        for _ in range(ROUNDS):
            calls = [stub.Generate(request, metadata=target.metadata) for _ in range(AT_ONCE)]
            await asyncio.sleep(0)
            for call in calls[: AT_ONCE // 2]:
                call.cancel()
            await asyncio.sleep(0.05)
            for call in calls:
                call.cancel()
            await asyncio.gather(*(count(seen, call) for call in calls))


ATTACK = Attack(name="rapid-resets", finding="C2", run=attack)
