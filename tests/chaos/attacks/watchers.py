from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc.aio
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc

from octavo.proto import cache_pb2

from ..attack import Attack, Seen, Target

WATCHES, SUBSCRIPTIONS, CANCELLED = 200, 50, 300


async def attack(target: Target, seen: Seen) -> None:
    async with target.cache() as cache, target.channel() as channel:
        vllm = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        begun = common_pb2.SubscribeKvEventsRequest()
        calls = [cache.Watch(cache_pb2.WatchRequest(), metadata=target.metadata) for _ in range(WATCHES)]
        calls += [vllm.SubscribeKvEvents(begun, metadata=target.metadata) for _ in range(SUBSCRIPTIONS)]
        readers = [asyncio.create_task(_read(call, seen)) for call in calls]
        for number in range(CANCELLED):
            call = cache.Watch(cache_pb2.WatchRequest(), metadata=target.metadata)
            await asyncio.sleep(0.001 * (number % 5))
            call.cancel()
        await asyncio.sleep(target.seconds)
        for call in calls:
            call.cancel()
        await asyncio.gather(*readers)


async def _read(call: Any, seen: Seen) -> None:
    try:
        async for _ in call:
            seen["events"] += 1
    except grpc.aio.AioRpcError as error:
        seen[error.code().name] += 1
    except asyncio.CancelledError:
        with contextlib.suppress(asyncio.CancelledError):
            seen["watched to the end"] += 1


ATTACK = Attack(name="watchers", finding="B2, E4", run=attack)
