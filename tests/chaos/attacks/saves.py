"""Saves of cached prompts by an operator while others fill a small pool."""

from __future__ import annotations

import asyncio
import time

from octavo.proto import cache_pb2
from octavo.proto import generation_pb2 as pb

from ..attack import Attack, Seen, Target, count

PROMPT_TOKENS = 600


async def attack(target: Target, seen: Seen) -> None:
    end = time.monotonic() + target.seconds
    metadata = target.operator_metadata
    async with target.generation() as stub, target.cache() as cache:
        number = 0
        while time.monotonic() < end:
            number += 1
            ids = pb.TokenIds(ids=[(number * 31 + at * 7) % 1400 + 3 for at in range(PROMPT_TOKENS)])
            other = pb.TokenIds(ids=[(number * 37 + at * 11) % 1400 + 3 for at in range(PROMPT_TOKENS)])
            sampling = pb.SamplingParams(max_tokens=2)
            request = pb.GenerateRequest(token_ids=ids, sampling=sampling)
            await count(seen, stub.Generate(request, metadata=metadata, timeout=20))
            save = cache_pb2.SaveRequest(path=f"{number}.safetensors", prompt=cache_pb2.Prefix(token_ids=ids))
            second = pb.GenerateRequest(token_ids=other, sampling=sampling)
            await asyncio.gather(
                count(seen, cache.Save(save, metadata=metadata, timeout=20)),
                count(seen, stub.Generate(second, metadata=metadata, timeout=20)),
            )


ATTACK = Attack(name="saves", finding="A4", run=attack, setup="tiny")
