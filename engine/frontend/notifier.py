"""Something happened: told to everybody who waits, on one event loop."""

from __future__ import annotations

import asyncio


class Notifier:
    """Take the ``next`` one, look at how things are, then wait for it: nothing is missed between."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def next(self) -> asyncio.Future[None]:
        """Done when ``send`` is called after this. It is shared: do not cancel it."""
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    def send(self) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
