from __future__ import annotations

import asyncio


class Notifier:
    """Wakes all waiting tasks. Call ``next``, check the state, then await the future."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def next(self) -> asyncio.Future[None]:
        """Return a shared future for the next ``send``. Do not cancel it."""
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    def send(self) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
