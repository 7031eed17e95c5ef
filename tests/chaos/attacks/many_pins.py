from __future__ import annotations

import asyncio
import itertools
import time

from octavo.proto import cache_pb2

from ..attack import Attack, Seen, Target, count, request_of

CALLERS = 4
WORDS = "a prompt that is worth keeping, " * 20


async def attack(target: Target, seen: Seen) -> None:
    end, numbers = time.monotonic() + target.seconds, itertools.count()
    async with target.generation() as stub:
        await count(
            seen, stub.Generate(request_of(WORDS, max_tokens=1), metadata=target.metadata, timeout=20)
        )

    async def loop() -> None:
        async with target.cache() as cache:
            while time.monotonic() < end:
                prefix = cache_pb2.Prefix(text=WORDS)
                request = cache_pb2.PinRequest(name=f"pin {next(numbers)}", prefix=prefix)
                await count(seen, cache.Pin(request, metadata=target.metadata, timeout=20))

    await asyncio.gather(*(loop() for _ in range(CALLERS)))
    async with target.cache() as cache:
        for number in range(next(numbers)):
            request = cache_pb2.UnpinRequest(name=f"pin {number}")
            await count(seen, cache.Unpin(request, metadata=target.metadata, timeout=20))
            if seen["NOT_FOUND"]:
                return


ATTACK = Attack(name="many-pins", finding="pins", run=attack)
