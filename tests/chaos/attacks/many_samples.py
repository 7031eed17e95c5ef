"""Requests with 64 samples, which take every running slot."""

from __future__ import annotations

import asyncio
import time

from ..attack import Attack, Seen, Target, count, request_of

CALLERS = 3


async def attack(target: Target, seen: Seen) -> None:
    end = time.monotonic() + target.seconds

    async def loop(seed: int) -> None:
        async with target.generation() as stub:
            while (left := end - time.monotonic()) > 0:
                request = request_of("again " * 20, max_tokens=1000, n=64, seed=seed, ignore_eos=True)
                await count(seen, stub.Generate(request, metadata=target.metadata, timeout=left))

    await asyncio.gather(*(loop(seed) for seed in range(CALLERS)))


ATTACK = Attack(name="many-samples", finding="slots", run=attack)
