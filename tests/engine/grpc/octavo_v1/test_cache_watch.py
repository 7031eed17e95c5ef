from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from fakes import FakeCore, small_config
from octavo.block_manager.events import EventLog
from octavo.engine.api.errors import EngineDead, EventsGone, FellBehind
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core import commands
from octavo.engine.core.commands import Command
from octavo.proto import cache_pb2 as pb
from served import Served, collect, eventually, served

pytestmark = pytest.mark.server

SHORT = SamplingParams(max_tokens=2)
PROMPT = list(range(10, 32))  # five pages of 4 tokens, and two more tokens


def log_of(its: Served) -> EventLog:
    assert its.core.core is not None
    return its.core.core.cache.blocks.events


async def say(its: Served, ids: list[int]) -> None:
    await collect(its.client.generate(ids, SHORT))


async def read(stream: AsyncGenerator[pb.WatchResponse, None], num_events: int) -> list[pb.WatchResponse]:
    events: list[pb.WatchResponse] = []
    while len(events) < num_events:
        response = await asyncio.wait_for(anext(stream), 20)
        if response.WhichOneof("event") is not None:
            events.append(response)
    return events


async def test_a_watcher_knows_the_cached_pages() -> None:
    async with served(config=small_config(num_pages=16)) as its:
        await say(its, [9] * 22)
        async with aclosing(its.client.cache.watch()) as stream:
            hello = await asyncio.wait_for(anext(stream), 20)
            assert hello.WhichOneof("event") is None
            assert hello.number > 0
            assert hello.log_id
            await say(its, PROMPT)
            (stored,) = await read(stream, 1)
            assert (stored.number, len(stored.stored.digests)) == (hello.number + 1, 5)
            assert stored.stored.parent == b""
            await say(its, [*PROMPT[:20], *[7] * 6])
            (more,) = await read(stream, 1)
            assert more.stored.parent == stored.stored.digests[-1]
            assert await its.client.cache.flush() > 0
            removed, cleared = await read(stream, 2)
            assert {*stored.stored.digests, *more.stored.digests} <= set(removed.removed.digests)
            assert cleared.WhichOneof("event") == "cleared"
            assert cleared.number == hello.number + 4, "numbers have no gaps"
        async with aclosing(its.client.cache.watch(hello.number + 1, log_id=hello.log_id)) as again:
            await anext(again)
            assert await read(again, 4) == [stored, more, removed, cleared], "what was missed is sent again"


async def test_a_watcher_with_an_invalid_start_gets_an_error() -> None:
    async with served() as its:
        await say(its, PROMPT)
        assert its.core.core is not None
        kept = its.core.core.cache.blocks.events.next_number
        for number, log_id in ((0, ""), (kept + 1, ""), (kept, "another start of the server")):
            with pytest.raises(EventsGone):
                await anext(its.client.cache.watch(number, log_id=log_id))
        async with aclosing(its.client.cache.watch(kept)) as stream:
            assert (await anext(stream)).number == kept - 1


async def test_a_watcher_that_falls_behind_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = asyncio.Event()
    monkeypatch.setattr("octavo.engine.grpc.page_events.BATCH", 1)

    def small(log: EventLog) -> None:
        log._capacity = 8

    async with served(config=small_config(num_pages=32)) as its:
        small(log_of(its))
        stream = its.client.cache.watch()
        await anext(stream)
        original = its.engine.run_command

        async def slow(command: Command[Any]) -> Any:
            if command.name == "page_events_since" and command.args[0] > 1:
                await reading.wait()
            return await original(command)

        monkeypatch.setattr(its.engine, "run_command", slow)
        await say(its, PROMPT)
        for number in range(12):
            await say(its, [number] * 22)
        reading.set()
        with pytest.raises(FellBehind, match="watch from there"):
            async for _ in stream:
                pass


async def test_idle_watchers_get_heartbeats_and_leave_no_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.grpc.octavo_v1.cache.HEARTBEAT_S", 0.05)
    async with served(FakeCore()) as its:
        await say(its, PROMPT)
        async with aclosing(its.client.cache.watch(1)) as stream:
            await anext(stream)
            (event,) = await read(stream, 1)
            beats = [await asyncio.wait_for(anext(stream), 20) for _ in range(2)]
            assert [(beat.number, beat.WhichOneof("event")) for beat in beats] == [(event.number, None)] * 2
        cache = its.core.core.cache if its.core.core else None
        assert cache is not None
        await eventually(lambda: not cache.is_watched, "a watcher that is gone costs nothing")
        change = its.engine.cache_changes.next()
        await say(its, [*PROMPT[:8], *range(100, 120)])
        await its.client.cache.flush()
        assert not change.done(), "nobody is to be told"
        await its.engine.run_command(commands.subscribe_events())
        await asyncio.wait_for(change, 20)


async def test_many_watchers_cost_the_engine_as_much_as_one() -> None:
    async with served() as its:
        ask, fetches = its.engine.run_command, list[int]()

        async def counting(command: Command[Any]) -> Any:
            if command.name == "page_events_since" and command.args[1]:
                fetches.append(command.args[0])
            return await ask(command)

        its.engine.run_command = counting  # type: ignore[method-assign]
        async with contextlib.AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(aclosing(its.client.cache.watch())) for _ in range(30)]
            for stream in streams:
                await asyncio.wait_for(anext(stream), 20)
            assert its.server.handler.page_events.num_watchers == 30
            await asyncio.sleep(0.05)
            fetches.clear()
            for number in range(5):
                await say(its, [number] * 22)
            seen = [await read(stream, 5) for stream in streams]
            assert all(events == seen[0] for events in seen)
        assert len(fetches) <= 5 * 2 + 30, "one fetch that finds something and one that does not, per change"


async def test_calls_cancelled_at_any_moment_leave_no_holders() -> None:
    async with served() as its:
        assert its.core.core is not None
        cache, hub = its.core.core.cache, its.server.handler.page_events

        async def watch() -> None:
            async with aclosing(its.client.cache.watch()) as stream:
                async for _ in stream:
                    pass

        for turn in range(60):
            calls = [asyncio.ensure_future(watch()) for _ in range(4)]
            for _ in range(turn % 12):
                await asyncio.sleep(0)
            if turn % 3:
                await asyncio.sleep(0.0005 * (turn % 7))
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        await eventually(lambda: hub.num_watchers == 0, "nobody is counted")
        await eventually(lambda: not cache.is_watched, "the engine tells nobody")
        async with aclosing(its.client.cache.watch()) as stream:
            await asyncio.wait_for(anext(stream), 20)
            assert cache.is_watched
            await say(its, PROMPT)
            assert len(await read(stream, 1)) == 1


async def test_watchers_get_the_error_of_a_dead_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.grpc.page_events.PROBE_S", 0.05)
    monkeypatch.setattr("octavo.engine.grpc.octavo_v1.cache.HEARTBEAT_S", 0.05)

    def fail() -> None:
        raise RuntimeError("broken on purpose")

    async with served(FakeCore(before_step=fail)) as its:
        stream = its.client.cache.watch()
        await asyncio.wait_for(anext(stream), 20)
        with pytest.raises(EngineDead):
            await say(its, PROMPT)
        with pytest.raises(EngineDead):
            await read(stream, 1)
