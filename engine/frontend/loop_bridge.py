"""Carries what the engine's thread says over to the event loop, once per step."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ..core.engine_core import EngineCore
from ..core.request import Update


class LoopBridge:
    """A Listener of the engine's thread whose callbacks run on the event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        ready: Callable[[EngineCore], None],
        updates: Callable[[list[Update]], None],
        cache_changed: Callable[[], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self._loop = loop
        self._ready = ready
        self._updates = updates
        self._cache_changed = cache_changed
        self._ended = ended

    def ready(self, core: EngineCore) -> None:
        self._call(self._ready, core)

    def updates(self, updates: list[Update]) -> None:
        if updates:
            self._call(self._updates, updates)

    def cache_changed(self) -> None:
        self._call(self._cache_changed)

    def ended(self, error: BaseException | None) -> None:
        self._call(self._ended, error)

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed under us: nobody is left to tell
            self._loop.call_soon_threadsafe(callback, *arguments)
