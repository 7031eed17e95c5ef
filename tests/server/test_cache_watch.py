"""Page events over the wire: in order, without gaps, and honest about what is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from fakes import FakeCore, small_config
from octavo.block_manager.events import EventLog
from octavo.engine.api.errors import EventsGone, FellBehind
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.commands import Command, PageEventsSince, SubscribeEvents
from octavo.engine.grpc.octavo_v1.cache import CacheServicer
from octavo.proto import cache_pb2 as pb
from served import Served, collect, served

SHORT = SamplingParams(max_tokens=2)
PROMPT = list(range(10, 32))  # five full pages of four, and two tokens


def log_of(its: Served) -> EventLog:
    assert its.core.core is not None
    return its.core.core.cache.blocks.events


async def say(its: Served, ids: list[int]) -> None:
    await collect(its.client.generate(ids, SHORT))


async def read(stream: AsyncGenerator[pb.WatchResponse, None], num_events: int) -> list[pb.WatchResponse]:
    """The next so many events, heartbeats left out."""
    events: list[pb.WatchResponse] = []
    while len(events) < num_events:
        response = await asyncio.wait_for(anext(stream), 20)
        if response.WhichOneof("event") is not None:
            events.append(response)
    return events


async def test_whoever_watches_knows_what_can_be_found() -> None:
    async with served(config=small_config(num_pages=16)) as its:
        await say(its, [9] * 22)  # before anybody watches
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


async def test_a_watcher_that_cannot_begin_there_is_told_so() -> None:
    async with served() as its:
        await say(its, PROMPT)
        assert its.core.core is not None
        kept = its.core.core.cache.blocks.events.next_number
        for number, log_id in ((0, ""), (kept + 1, ""), (kept, "another start of the server")):
            with pytest.raises(EventsGone):
                await anext(its.client.cache.watch(number, log_id=log_id))
        async with aclosing(its.client.cache.watch(kept)) as stream:
            assert (await anext(stream)).number == kept - 1


async def test_a_watcher_that_falls_behind_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the first batch, is busy, and the log moves on without it."""
    reading = asyncio.Event()
    monkeypatch.setattr("octavo.engine.grpc.octavo_v1.page_events.BATCH", 1)

    def small(log: EventLog) -> None:
        log._capacity = 8

    async with served(config=small_config(num_pages=32)) as its:
        small(log_of(its))
        stream = its.client.cache.watch()
        await anext(stream)
        original = its.engine.ask

        async def slow(command: Command[Any]) -> Any:
            if isinstance(command, PageEventsSince) and command.number > 1:
                await reading.wait()
            return await original(command)

        monkeypatch.setattr(its.engine, "ask", slow)
        await say(its, PROMPT)
        for number in range(12):
            await say(its, [number] * 22)
        reading.set()
        with pytest.raises(FellBehind, match="begin again"):
            async for _ in stream:
                pass


async def test_heartbeats_come_while_nothing_happens_and_nobody_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CacheServicer.__init__, "__kwdefaults__", {"heartbeat_s": 0.05})
    async with served(FakeCore()) as its:
        await say(its, PROMPT)
        async with aclosing(its.client.cache.watch(1)) as stream:
            await anext(stream)
            (event,) = await read(stream, 1)
            beats = [await asyncio.wait_for(anext(stream), 20) for _ in range(2)]
            assert [(beat.number, beat.WhichOneof("event")) for beat in beats] == [(event.number, None)] * 2
        cache = its.core.core.cache if its.core.core else None
        assert cache is not None
        for _ in range(1000):
            if not cache.num_watchers:
                break
            await asyncio.sleep(0.01)
        assert cache.num_watchers == 0, "a watcher that is gone costs nothing"
        change = its.engine.cache_changes.next()
        await say(its, [*PROMPT[:8], *range(100, 120)])
        await its.client.cache.flush()
        assert not change.done(), "nobody is to be told"
        await its.engine.ask(SubscribeEvents())
        await asyncio.wait_for(change, 20)  # of what came before: a watcher looks at once
