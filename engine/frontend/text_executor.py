from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ..api.tenant import Tenant
from .holders import Holders

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")

NUM_THREADS = 2


class TextExecutor:
    """Thread pool for text work. A running function cannot be stopped."""

    def __init__(self, name: str, *, max_pending: int = sys.maxsize) -> None:
        self.name = name
        self.pending = Holders("pending_calls", f"calls to {name} text are pending", max_pending)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=f"octavo-{name}")

    async def run(
        self,
        tenant: Tenant,
        function: Callable[Parameters, Answer],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Answer:
        """Return the function's result. Raises Overloaded if too many calls are pending."""
        self.pending.take(tenant)
        loop = asyncio.get_running_loop()

        def done(_: Future[Answer]) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.pending.give_back, tenant)

        future = self._threads.submit(function, *args, **kwargs)
        future.add_done_callback(done)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Start no more functions. Running functions continue."""
        self._threads.shutdown(wait=False, cancel_futures=True)


Result = TypeVar("Result")


async def call_on_daemon(function: Callable[[], Result], *, name: str) -> Result:
    """Run a function on a new daemon thread and return its result."""
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
