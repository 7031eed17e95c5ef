"""Loads that the runs with and without attacks need; none of them is an attack."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from octavo.proto import generation_pb2 as pb

from ..attack import Seen, Target, attack, count, repeat

FILLED = 36_000  # tokens; more than the positions of any pool
PROMPT_TOKENS = 1000  # fits the smallest pool


def _request(rng: random.Random, tokens: int, **sampling: Any) -> pb.GenerateRequest:
    ids = pb.TokenIds(ids=[rng.randrange(3, 1500) for _ in range(tokens)])
    return pb.GenerateRequest(token_ids=ids, sampling=pb.SamplingParams(**sampling))


@attack("idle-cpu", "-")
async def burn(target: Target, seen: Seen) -> None:
    """Take as much CPU time as attackers, for the run without attacks."""
    end = time.monotonic() + target.seconds
    while time.monotonic() < end:
        seen["rounds"] += 1


@attack("distinct-prompts", "-")
async def send_distinct_prompts(target: Target, seen: Seen) -> None:
    rng = random.Random(time.time_ns())

    async def call(stub: Any, *_: Any) -> None:
        request = _request(rng, 400, max_tokens=4, ignore_eos=True)
        await count(seen, stub.Generate(request, metadata=target.metadata, timeout=20))
        await asyncio.sleep(0.05)

    await repeat(target, 1, call)


@attack("fill-pool", "-")
async def fill_pool(target: Target, seen: Seen) -> None:
    rng = random.Random(7)
    async with target.generation() as stub:
        for _ in range(FILLED // PROMPT_TOKENS):
            request = _request(rng, PROMPT_TOKENS, max_tokens=1)
            await count(seen, stub.Generate(request, metadata=target.metadata, timeout=30))
