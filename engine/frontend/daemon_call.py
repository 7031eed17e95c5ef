"""Blocking calls outside of the event loop's executor, because Python waits for its threads at exit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def call_on_daemon(function: Callable[[], Result], *, name: str) -> Result:
    """Run a function on a new daemon thread; return its result or raise its error. Cancelling the wait does
    not stop the thread, which ends when the call does."""
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
