"""Writing responses to clients that may have stopped reading."""

from __future__ import annotations

import asyncio
from typing import Any

from ..api.errors import SlowReader
from .status import Context

WRITE_TIMEOUT_S = 30.0


class _Write:
    """One that is going on."""

    __slots__ = ("expired", "since", "task")

    def __init__(self, task: asyncio.Task[Any], since: float) -> None:
        self.task = task
        self.since = since
        self.expired = False


class ResponseWriter:
    """Writes responses of all calls, and ends a call whose write has not moved for ``timeout_s``.

    A write waits while a client, its connection's buffers full, does not read. It is timed without
    a timer of its own: writes end in microseconds, and there is one for every token.
    """

    def __init__(self, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._writes: dict[_Write, None] = {}  # oldest first
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, context: Context, response: Any) -> None:
        """Hand a response to the transport. SlowReader if that takes too long."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        write = _Write(task, loop.time())
        self._writes[write] = None
        if self._timer is None:
            self._timer = loop.call_later(self._timeout_s, self._check)
        try:
            await context.write(response)
        except asyncio.CancelledError:
            if write.expired and not task.uncancel():  # else somebody else cancelled it too
                raise SlowReader(
                    f"the client has not read its output for {self._timeout_s:g} s; read faster, ask for "
                    "less output, or start the server with a longer --write-timeout"
                ) from None
            raise
        finally:
            self._writes.pop(write, None)

    def _check(self) -> None:
        """Cancel the writes that have taken too long; look again when the next may have."""
        loop, self._timer = asyncio.get_running_loop(), None
        now = loop.time()
        while self._writes:
            write = next(iter(self._writes))
            left = write.since + self._timeout_s - now
            if left > 0:
                self._timer = loop.call_later(left, self._check)
                return
            del self._writes[write]
            write.expired = True
            write.task.cancel()
