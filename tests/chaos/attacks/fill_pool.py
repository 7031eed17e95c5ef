from __future__ import annotations

import random

from octavo.proto import generation_pb2 as pb

from ..attack import Attack, Seen, Target, count

TOKENS = 36_000  # more than the positions of any pool
PROMPT_TOKENS = 1000  # fits the smallest pool


async def fill(target: Target, seen: Seen) -> None:
    rng = random.Random(7)
    async with target.generation() as stub:
        for _ in range(TOKENS // PROMPT_TOKENS):
            ids = [rng.randrange(3, 1500) for _ in range(PROMPT_TOKENS)]
            sampling = pb.SamplingParams(max_tokens=1)
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling)
            await count(seen, stub.Generate(request, metadata=target.metadata, timeout=30))


ATTACK = Attack(name="fill-pool", finding="-", run=fill)
