from __future__ import annotations

import asyncio
import random
import time

from octavo.proto import generation_pb2 as pb

from ..attack import Attack, Seen, Target, count


async def send(target: Target, seen: Seen) -> None:
    rng = random.Random(time.time_ns())
    end = time.monotonic() + target.seconds
    async with target.generation() as stub:
        while time.monotonic() < end:
            ids = [rng.randrange(3, 1500) for _ in range(400)]
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(max_tokens=4, ignore_eos=True)
            )
            await count(seen, stub.Generate(request, metadata=target.metadata, timeout=20))
            await asyncio.sleep(0.05)


ATTACK = Attack(name="distinct-prompts", finding="-", run=send)
