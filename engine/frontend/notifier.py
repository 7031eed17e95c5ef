"""A notification of all tasks that wait on one event loop."""

from __future__ import annotations

import asyncio


class Notifier:
    """Event that no waiter misses. Get a future from ``next``, check the state, and then await the future."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def next(self) -> asyncio.Future[None]:
        """Return a shared future that ``send`` completes; do not cancel it."""
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    def send(self) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
