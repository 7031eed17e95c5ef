from __future__ import annotations

import asyncio
import time

from octavo.proto import generation_pb2 as pb

from ..attack import Attack, Seen, Target, count, request_of
from .ambiguous_grammars import GRAMMARS

CALLERS = 12


async def attack(target: Target, seen: Seen) -> None:
    end = time.monotonic() + target.seconds

    async def loop(number: int) -> None:
        async with target.generation() as stub:
            while (left := end - time.monotonic()) > 0:
                request = request_of(
                    max_tokens=2000,
                    n=5,
                    temperature=1.0,
                    seed=number,
                    ignore_eos=True,
                    logit_bias=dict.fromkeys(range(60, 100), 50.0),
                    structured=pb.Structured(grammar=GRAMMARS[number % len(GRAMMARS)]),
                )
                call = stub.Generate(request, metadata=target.metadata, timeout=left)
                if number % 2:
                    asyncio.get_running_loop().call_later(1.0, call.cancel)
                await count(seen, call)

    await asyncio.gather(*(loop(number) for number in range(CALLERS)))


# INTERNAL: only this request fails, because one of its masks takes too long.
ATTACK = Attack(name="spent-grammars", finding="masks", run=attack, may_see=frozenset({"INTERNAL"}))
