from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from octavo.block_manager import PageEvent

from ..api.errors import EngineDead, EventsGone, FellBehind
from ..api.tenant import Tenant
from ..core import commands
from ..core.commands import EventLogState
from ..frontend.holders import Holders

if TYPE_CHECKING:
    from ..frontend.async_engine import AsyncEngine

BATCH = 512
MAX_WATCHERS = 64
PAUSE_S = 0.01  # seconds between two reads of one watcher
PROBE_S = 1.0  # seconds between checks for new events


class PageEventHub:
    """Reads page events from the engine for its watchers. Use it only on the event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.holders = Holders("watchers", "streams watch the cache", MAX_WATCHERS)
        self._reads: dict[tuple[int, asyncio.Future[None]], asyncio.Task[list[PageEvent]]] = {}

    @property
    def num_watchers(self) -> int:
        return self.holders.total

    @contextlib.asynccontextmanager
    async def watching(self, tenant: Tenant, *, tokens: bool = False) -> AsyncIterator[EventLogState]:
        """Register a watcher during an ``async with`` block. Raises Overloaded if there are too many."""
        try:
            with self.holders.hold(tenant):
                yield await self._engine.run_command(commands.subscribe_events(tokens))
        finally:
            if not self.holders.total:
                with contextlib.suppress(EngineDead):
                    await asyncio.shield(self._engine.run_command(commands.unsubscribe_events()))

    async def check_kept(self, number: int) -> None:
        """Raise EventsGone if event ``number`` has expired or is in the future."""
        await self._engine.run_command(commands.page_events_since(number, 0))

    async def events_from(self, number: int, *, heartbeat_s: float) -> AsyncGenerator[list[PageEvent], None]:
        """Yield lists of new events; an empty list after ``heartbeat_s`` without events. Raises FellBehind if
        events expired."""
        loop = asyncio.get_running_loop()
        told_at = loop.time()
        while True:
            change = self._engine.cache_changes.next()
            events = await self._read(number, change)
            number += len(events)
            if events:
                yield events
                told_at = loop.time()
                await asyncio.sleep(PAUSE_S)
                continue
            await asyncio.wait((change,), timeout=min(PROBE_S, heartbeat_s))
            if not change.done() and loop.time() - told_at >= heartbeat_s:
                yield []
                told_at = loop.time()

    async def _read(self, number: int, change: asyncio.Future[None]) -> list[PageEvent]:
        key = (number, change)  # watchers that wait for the same event and change share a command
        if (read := self._reads.get(key)) is None:
            read = self._reads[key] = asyncio.ensure_future(self._fetch(number))
            read.add_done_callback(functools.partial(self._forget, key))
        return await asyncio.shield(read)

    def _forget(self, key: tuple[int, asyncio.Future[None]], read: asyncio.Task[list[PageEvent]]) -> None:
        del self._reads[key]
        if not read.cancelled():
            read.exception()  # if all of its watchers have left, nothing else retrieves it

    async def _fetch(self, number: int) -> list[PageEvent]:
        try:
            return await self._engine.run_command(commands.page_events_since(number, BATCH))
        except EventsGone as error:
            raise FellBehind(
                f"the client read events too slowly, so event {number} is lost; list the cached pages again, "
                "then watch from there"
            ) from error
