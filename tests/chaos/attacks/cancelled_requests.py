from __future__ import annotations

import asyncio
import random
import time

from octavo.proto import cache_pb2
from octavo.proto import generation_pb2 as pb

from ..attack import Attack, Seen, Target, count, request_of

CALLERS = 6


async def attack(target: Target, seen: Seen) -> None:
    end = time.monotonic() + target.seconds

    async def loop(seed: int) -> None:
        rng = random.Random(seed)
        async with target.generation() as stub, target.cache() as cache:
            while time.monotonic() < end:
                words = "again and again " * rng.randrange(1, 400)
                kind = rng.randrange(6)
                if kind == 0:
                    call = stub.Tokenize(pb.TokenizeRequest(text=words), metadata=target.metadata)
                elif kind == 1:
                    call = cache.GetStats(cache_pb2.GetStatsRequest(), metadata=target.metadata)
                else:
                    request = request_of(
                        words,
                        max_tokens=400,
                        n=rng.choice((1, 1, 4)),
                        logprobs=rng.choice((None, 5)),
                        structured=pb.Structured(json_object=True) if kind == 2 else None,
                        prompt_logprobs=1 if kind == 3 else None,
                    )
                    deadline = rng.choice((None, 0.02))
                    call = stub.Generate(request, metadata=target.metadata, timeout=deadline)
                asyncio.get_running_loop().call_later(rng.random() * 0.1, call.cancel)
                await count(seen, call)

    await asyncio.gather(*(loop(seed) for seed in range(CALLERS)))


ATTACK = Attack(name="cancelled-requests", finding="G", run=attack)
