"""Page events as they come: what every kind of subscription reads."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass

from octavo.block_manager import EventsLost, PageEvent

from ...api.errors import EngineDead, EventsGone, FellBehind
from ...core.engine_core import EngineCore
from ..interface import Engine

BATCH = 512  # events that are fetched at once


@dataclass(frozen=True, slots=True)
class Subscription:
    """Where a watcher stands.

    number         of the next event, of the log ``log_id``, which began at ``log_began`` (seconds
                   since the epoch)
    tokens_since   number of the first event with tokens; ``number`` if they are not kept
    """

    number: int
    log_id: str
    log_began: float
    tokens_since: int


async def subscribe(engine: Engine, *, tokens: bool = False) -> Subscription:
    """Be told of events from now on, until ``unsubscribe``."""

    def begin(core: EngineCore) -> Subscription:
        cache = core.cache
        number = cache.watch(tokens=tokens)
        since = cache.blocks.events.tokens_since or number
        return Subscription(number, cache.log_id, cache.log_began, since)

    return await engine.ask(begin)


async def unsubscribe(engine: Engine) -> None:
    with suppress(EngineDead):  # then there is nothing to end
        await engine.ask(lambda core: core.cache.unwatch())


async def check_kept(engine: Engine, number: int) -> None:
    """EventsGone unless the events from ``number`` on are kept, or it is the next one."""
    try:
        await engine.ask(lambda core: core.cache.events(number, 0))
    except EventsLost as error:
        raise EventsGone(str(error)) from error


async def events_from(
    engine: Engine, number: int, *, heartbeat_s: float
) -> AsyncGenerator[list[PageEvent], None]:
    """The events from ``number`` on, which are kept, in order, some at a time; an empty list when
    nothing came for ``heartbeat_s``. FellBehind if the log lost some while the reader was busy.
    Only between ``subscribe`` and ``unsubscribe``."""
    cursor = number
    while True:
        change = engine.cache_changes.next()
        try:
            events = await engine.ask(functools.partial(_events, number=cursor))
        except EventsLost as error:
            raise FellBehind(
                f"events came faster than they were read, and number {cursor} is gone; begin again "
                "with what is cached now"
            ) from error
        cursor += len(events)
        if events:
            yield events
        elif not await _happens(change, heartbeat_s):
            yield []


def _events(core: EngineCore, number: int) -> list[PageEvent]:
    return core.cache.events(number, BATCH)


async def _happens(change: asyncio.Future[None], within: float) -> bool:
    """Whether it does, in so many seconds."""
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(change), within)
        return True
    return False
