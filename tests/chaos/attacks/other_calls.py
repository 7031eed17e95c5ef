"""Pins, statistics and watches: calls that scan the cache or last as long as the client wants."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import grpc.aio
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from octavo.proto import cache_pb2

from ..attack import Seen, Target, attack, count, repeat, request_of

WATCHES, SUBSCRIPTIONS, CANCELLED = 200, 50, 300


@attack("many-pins", "pins")
async def pin(target: Target, seen: Seen) -> None:
    words, numbers = "a prompt that is worth keeping, " * 20, itertools.count()
    options: dict[str, Any] = {"metadata": target.metadata, "timeout": 20}
    async with target.generation() as stub, target.cache() as cache:
        await count(seen, stub.Generate(request_of(words, max_tokens=1), **options))

        async def call(own: Any, *_: Any) -> None:
            prefix = cache_pb2.Prefix(text=words)
            request = cache_pb2.PinRequest(name=f"pin {next(numbers)}", prefix=prefix)
            await count(seen, own.Pin(request, **options))

        await repeat(target, 4, call, Target.cache)
        for number in range(next(numbers)):
            await count(seen, cache.Unpin(cache_pb2.UnpinRequest(name=f"pin {number}"), **options))
            if seen["NOT_FOUND"]:
                return


@attack("statistics-flood", "B2")
async def ask_for_statistics(target: Target, seen: Seen) -> None:
    """Call GetStats and GetLoads in loops. Each call scans the cache or all requests."""
    options: dict[str, Any] = {"metadata": target.metadata, "timeout": 20}

    async def call(channel: Any, cache: Any, *_: Any) -> None:
        await count(seen, cache.GetStats(cache_pb2.GetStatsRequest(num_prefixes=1000), **options))
        vllm = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        await count(seen, vllm.GetLoads(vllm_engine_pb2.GetLoadsRequest(), **options))
        await asyncio.sleep(0.002)

    await repeat(target, 8, call, Target.channel, Target.cache)


@attack("watchers", "B2, E4")
async def watch(target: Target, seen: Seen) -> None:
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
