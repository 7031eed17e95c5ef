from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ..api.errors import Overloaded

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")

NUM_THREADS = 2


class TextExecutor:
    """Thread pool for text work. A running function cannot be stopped."""

    def __init__(
        self, name: str, *, max_pending: int | None = None, max_tenant_share: int | None = None
    ) -> None:
        self._name = name
        self._max_pending = max_pending
        self._max_tenant_share = max_tenant_share
        self._pending: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=f"octavo-{name}")

    @property
    def num_pending(self) -> int:
        return sum(tuple(self._pending.values()))

    async def run(
        self,
        tenant: str,
        function: Callable[Parameters, Answer],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Answer:
        """Return the function's result. Raises Overloaded if too many calls are pending."""
        self._check(tenant)
        loop = asyncio.get_running_loop()
        self._pending[tenant] += 1

        def done(_: Future[Answer]) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._forget, tenant)

        future = self._threads.submit(function, *args, **kwargs)
        future.add_done_callback(done)
        return await asyncio.wrap_future(future)

    def _check(self, tenant: str) -> None:
        own, total = self._pending[tenant], self.num_pending
        if tenant and self._max_tenant_share is not None and own >= self._max_tenant_share:
            raise Overloaded(
                f"{own} calls of this tenant to {self._name} text are pending, but at most "
                f"{self._max_tenant_share} are allowed; try again later",
                pending_calls=own,
                max_pending_calls=self._max_tenant_share,
            )
        if self._max_pending is not None and total >= self._max_pending:
            raise Overloaded(
                f"{total} calls to {self._name} text are pending, but at most {self._max_pending} are "
                "allowed; try again later",
                pending_calls=total,
                max_pending_calls=self._max_pending,
            )

    def _forget(self, tenant: str) -> None:
        self._pending[tenant] -= 1
        if not self._pending[tenant]:
            del self._pending[tenant]

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
