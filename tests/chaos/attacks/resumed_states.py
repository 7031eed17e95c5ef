"""Long outputs of a recurrent model in a small pool, cancelled at random."""

from __future__ import annotations

import asyncio
import random
import time

from ..attack import Attack, Seen, Target, count, request_of

CALLERS = 12


async def attack(target: Target, seen: Seen) -> None:
    end = time.monotonic() + target.seconds

    async def loop(seed: int) -> None:
        rng = random.Random(seed)
        async with target.generation() as stub:
            while time.monotonic() < end:
                request = request_of(
                    f"story {rng.randrange(5)} " * rng.randrange(5, 60),
                    max_tokens=rng.randrange(20, 300),
                    n=rng.choice((1, 1, 2)),
                    ignore_eos=True,
                )
                call = stub.Generate(request, metadata=target.metadata, timeout=20)
                if rng.random() < 0.5:
                    asyncio.get_running_loop().call_later(rng.random() * 2, call.cancel)
                await count(seen, call)

    await asyncio.gather(*(loop(seed) for seed in range(CALLERS)))


MEMORY = Attack(name="resumed-states", finding="state slots", run=attack, setup="recurrent")
DISK = Attack(name="states-on-disk", finding="state slots", run=attack, setup="recurrent-disk")
