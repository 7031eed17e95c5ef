from __future__ import annotations

import asyncio
import contextlib

import grpc.aio

from ..attack import Attack, Seen, Target, request_of

STREAMS = 24


async def attack(target: Target, seen: Seen) -> None:
    async with asyncio.TaskGroup() as tasks:
        for _ in range(STREAMS):
            tasks.create_task(_never_read(target, seen))


async def _never_read(target: Target, seen: Seen) -> None:
    async with target.generation() as stub:
        request = request_of(max_tokens=1200, logprobs=20, ignore_eos=True, temperature=1.0)
        call = stub.Generate(request, metadata=target.metadata)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.wait_for_connection()
        await asyncio.sleep(target.seconds)
        done = call.done()
        seen[(await call.code()).name if done else "held to the end"] += 1
        call.cancel()


ATTACK = Attack(name="slow-readers", finding="C1", run=attack)
