"""Calls that may block, beside the event loop and its executor, whose threads Python waits for at exit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def call_on_daemon(function: Callable[[], Result], *, name: str) -> Result:
    """Return or raise what a function does on a daemon thread of its own. Cancelling the
    wait leaves the thread alone: it ends when the call does, and nobody waits for it."""
    answer: Future[Result] = Future()

    def call() -> None:
        try:
            result = function()
        except BaseException as error:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
        else:
            if answer.set_running_or_notify_cancel():
                answer.set_result(result)

    threading.Thread(target=call, name=name, daemon=True).start()
    return await asyncio.wrap_future(answer)
