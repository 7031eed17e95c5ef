from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from octavo.block_manager import PageEvent

from ..api.errors import EngineDead, EventsGone, FellBehind
from ..api.tenant import Tenant
from ..core import commands
from ..core.commands import EventLogState
from ..frontend.holders import Holders
from ..frontend.notifier import Notifier

if TYPE_CHECKING:
    from ..frontend.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

BATCH = 512
MAX_WATCHERS = 64
PAUSE_S = 0.01  # seconds between two fetches
PROBE_S = 1.0  # seconds between checks for new events
_KEPT = 4096


class PageEventHub:
    """Fetches page events from the engine while there are watchers. Use it only on the event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.holders = Holders("watchers", "streams watch the cache", MAX_WATCHERS)
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._news = Notifier()
        self._left = Notifier()
        self._latest: deque[PageEvent] = deque(maxlen=_KEPT)
        self._next = 0

    @property
    def num_watchers(self) -> int:
        return self.holders.total

    @contextlib.asynccontextmanager
    async def watching(self, tenant: Tenant, *, tokens: bool = False) -> AsyncIterator[EventLogState]:
        """Register a watcher during an ``async with`` block. Raises Overloaded if there are too many."""
        try:
            with self.holders.hold(tenant):
                self._follow()
                yield await self._engine.run_command(commands.subscribe_events(tokens))
        finally:
            self._left.send()

    async def check_kept(self, number: int) -> None:
        """Raise EventsGone if event ``number`` has expired or is in the future."""
        await self._engine.run_command(commands.page_events_since(number, 0))

    async def events_from(self, number: int, *, heartbeat_s: float) -> AsyncGenerator[list[PageEvent], None]:
        """Yield lists of new events. Raises FellBehind if events expired."""
        cursor = number
        while True:
            news = self._news.next()
            events = await self._read(cursor)
            cursor += len(events)
            if events:
                yield events
            elif not await _happens(news, heartbeat_s):
                yield []

    async def _read(self, number: int) -> list[PageEvent]:
        if self._error is not None:
            raise self._error
        latest = self._latest
        if latest and latest[0].number <= number:
            return list(islice(latest, number - latest[0].number, number - latest[0].number + BATCH))
        if self._next and number >= self._next:
            return []
        try:
            return await self._engine.run_command(commands.page_events_since(number, BATCH))
        except EventsGone as error:
            raise FellBehind(
                f"the client read events too slowly, so event {number} is lost; list the cached pages again, "
                "then watch from there"
            ) from error

    def _follow(self) -> None:
        if self._task is None:
            self._error = None
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self.holders.total:
                await self._fetch_while_watched()
                self._forget()
                await self._engine.run_command(commands.unsubscribe_events())
        except Exception as error:
            if not isinstance(error, EngineDead):
                logger.exception("page events are no longer available")
            self._error = error
            self._forget()
            self._news.send()
        finally:
            self._task = None

    async def _fetch_while_watched(self) -> None:
        self._next = (await self._engine.run_command(commands.subscribe_events())).number
        self._news.send()
        while self.holders.total:
            change, left = self._engine.cache_changes.next(), self._left.next()
            try:
                events = await self._engine.run_command(commands.page_events_since(self._next, BATCH))
            except EventsGone:
                self._forget()
                self._next = (await self._engine.run_command(commands.subscribe_events())).number
                self._news.send()
                continue
            if events:
                self._latest.extend(events)
                self._next += len(events)
                self._news.send()
                await asyncio.sleep(PAUSE_S)
            else:
                await asyncio.wait((change, left), timeout=PROBE_S, return_when=asyncio.FIRST_COMPLETED)

    def _forget(self) -> None:
        self._latest.clear()
        self._next = 0


async def _happens(change: asyncio.Future[None], within: float) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(change), within)
        return True
    return False
