"""Page events as they come: read once from the engine, and handed to everybody who watches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from itertools import islice

from octavo.block_manager import PageEvent

from ..api.errors import EngineDead, EventsGone, FellBehind
from ..api.tenant import Tenant
from ..core.commands import EventLogState, PageEventsSince, SubscribeEvents, UnsubscribeEvents
from ..frontend.holders import Holders
from ..frontend.notifier import Notifier
from .interface import Engine

logger = logging.getLogger(__name__)

BATCH = 512  # events that are fetched, and that a watcher gets, at once
MAX_WATCHERS = 64
PAUSE_S = 0.01  # between two fetches: what comes meanwhile is handed on together
PROBE_S = 1.0  # the engine is asked that often though nothing has come: it may have died
_KEPT = 4096  # events that slower watchers need not ask the engine for


class PageEventHub:
    """Follows the engine's page events while anybody watches. Lives on the event loop.

    Whatever happens to a watcher's call, one task alone ends the subscription, when nobody is left.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.holders = Holders("watchers", "streams watch the cache", MAX_WATCHERS)
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._news = Notifier()
        self._left = Notifier()
        self._latest: deque[PageEvent] = deque(maxlen=_KEPT)
        self._next = 0  # number of the event after the latest; 0: nothing is followed

    @property
    def num_watchers(self) -> int:
        return self.holders.total

    @contextlib.asynccontextmanager
    async def watching(self, tenant: Tenant, *, tokens: bool = False) -> AsyncIterator[EventLogState]:
        """Register a watcher, which may read ``events_from`` until the block ends. Overloaded when there
        are too many, in all or of its tenant.

        tokens   keep the tokens of pages that are published from now on
        """
        try:
            with self.holders.held(tenant):
                self._follow()
                yield await self._engine.ask(SubscribeEvents(tokens))
        finally:
            self._left.send()

    async def check_kept(self, number: int) -> None:
        """EventsGone unless the events from ``number`` on are kept, or it is the next one."""
        await self._engine.ask(PageEventsSince(number, 0))

    async def events_from(self, number: int, *, heartbeat_s: float) -> AsyncGenerator[list[PageEvent], None]:
        """The events from ``number`` on, which are kept, in order, some at a time; an empty list when
        nothing came for ``heartbeat_s``. FellBehind if the log lost some while the reader was busy."""
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
            return await self._engine.ask(PageEventsSince(number, BATCH))
        except EventsGone as error:
            raise FellBehind(
                f"events came faster than they were read, and number {number} is gone; begin again "
                "with what is cached now"
            ) from error

    def _follow(self) -> None:
        if self._task is None:
            self._error = None
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Follow the log until nobody watches."""
        try:
            while self.holders.total:
                await self._fetch_while_watched()
                self._forget()
                await self._engine.ask(UnsubscribeEvents())
        except Exception as error:
            if not isinstance(error, EngineDead):
                logger.exception("page events can be followed no longer")
            self._error = error
            self._forget()
            self._news.send()
        finally:
            self._task = None

    async def _fetch_while_watched(self) -> None:
        self._next = (await self._engine.ask(SubscribeEvents())).number
        self._news.send()  # to those who began before, and may have missed the last ones
        while self.holders.total:
            change, left = self._engine.cache_changes.next(), self._left.next()
            try:
                events = await self._engine.ask(PageEventsSince(self._next, BATCH))
            except EventsGone:  # too fast even for this; whoever needs what is lost falls behind
                self._forget()
                self._next = (await self._engine.ask(SubscribeEvents())).number
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
    """Whether it does, in so many seconds."""
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(change), within)
        return True
    return False
