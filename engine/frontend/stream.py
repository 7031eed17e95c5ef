"""Output of one request on its way from the engine's thread to whoever reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..api.outputs import Delta
from ..core.request import Request


class Stream:
    """Holds at most one pending delta per sample: a slow reader gets fewer and larger ones.

    Lives on the event loop. ``ended`` once every sample's last delta is in.

    interval   tokens that a delta has at least, but for a sample's first and last one
    """

    def __init__(self, request: Request, on_end: Callable[[Stream], None], *, interval: int = 1) -> None:
        self.request = request
        self.ended = False
        self._on_end = on_end
        self._interval = interval
        self._num_open = request.params.n
        self._begun: set[int] = set()  # samples whose first delta has come
        self._held: dict[int, Delta] = {}  # too small to be read
        self._pending: dict[int, Delta] = {}
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None

    def push(self, delta: Delta) -> None:
        """Add what is new; it merges with what has not been read."""
        index = delta.index
        if self._interval > 1 and (held := self._held.pop(index, None)) is not None:
            delta = held.merge(delta)
        if len(delta.token_ids) < self._interval and delta.finish_reason is None and index in self._begun:
            self._held[index] = delta
            return
        self._begun.add(index)
        pending = self._pending.get(index)
        self._pending[index] = delta if pending is None else pending.merge(delta)
        if delta.finish_reason is not None:
            self._num_open -= 1
            if not self._num_open:
                self._end()
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End the stream with an exception that the reader sees at once."""
        self._error = error
        self._end()
        self._wake()

    async def next(self) -> Delta | None:
        """The oldest news; None after the last. Only one reader."""
        while True:
            if self._error is not None:
                raise self._error
            if self._pending:
                return self._pending.pop(next(iter(self._pending)))
            if self.ended:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._on_end(self)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
