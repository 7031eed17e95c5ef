"""Page events as they come: what every kind of subscription reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from octavo.block_manager import PageEvent

from ...api.errors import EngineDead, EventsGone, FellBehind
from ...core.commands import EventLogState, PageEventsSince, SubscribeEvents, UnsubscribeEvents
from ..interface import Engine

BATCH = 512  # events that are fetched at once


async def subscribe(engine: Engine, *, tokens: bool = False) -> EventLogState:
    """Be told of events from now on, until ``unsubscribe``."""
    return await engine.ask(SubscribeEvents(tokens))


async def unsubscribe(engine: Engine) -> None:
    with suppress(EngineDead):  # then there is nothing to end
        await engine.ask(UnsubscribeEvents())


async def check_kept(engine: Engine, number: int) -> None:
    """EventsGone unless the events from ``number`` on are kept, or it is the next one."""
    await engine.ask(PageEventsSince(number, 0))


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
            events = await engine.ask(PageEventsSince(cursor, BATCH))
        except EventsGone as error:
            raise FellBehind(
                f"events came faster than they were read, and number {cursor} is gone; begin again "
                "with what is cached now"
            ) from error
        cursor += len(events)
        if events:
            yield events
        elif not await _happens(change, heartbeat_s):
            yield []


async def _happens(change: asyncio.Future[None], within: float) -> bool:
    """Whether it does, in so many seconds."""
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(change), within)
        return True
    return False
