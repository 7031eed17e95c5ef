"""Threads for work on text: encoding, decoding, rendering."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ..api.errors import Overloaded

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")

NUM_THREADS = 2


class TextExecutor:
    """Runs functions beside the event loop that it is used on, on threads of its own, so that
    texts wait for texts and for nothing else.

    A thread cannot be stopped: what runs on one after its caller has left still counts.
    """

    def __init__(
        self, name: str, *, max_pending: int | None = None, max_tenant_share: int | None = None
    ) -> None:
        """``max_pending``: calls that run or wait, all tenants together, and ``max_tenant_share``: of one
        that has a name (None: any number; then something else bounds them)."""
        self._name = name
        self._max_pending = max_pending
        self._max_tenant_share = max_tenant_share
        self._pending: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=f"octavo-{name}")

    @property
    def num_pending(self) -> int:
        """Calls that run or wait."""
        return sum(tuple(self._pending.values()))  # a copy: other threads count too

    async def run(
        self,
        tenant: str,
        function: Callable[Parameters, Answer],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Answer:
        """Return or raise what the function does; Overloaded when too many calls are pending. ``tenant``:
        on whose behalf; "" where there are no tenants."""
        self._check(tenant)
        loop = asyncio.get_running_loop()
        self._pending[tenant] += 1

        def done(_: Future[Answer]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody counts any more
                loop.call_soon_threadsafe(self._forget, tenant)

        future = self._threads.submit(function, *args, **kwargs)
        future.add_done_callback(done)
        return await asyncio.wrap_future(future)

    def _check(self, tenant: str) -> None:
        own, total = self._pending[tenant], self.num_pending
        if tenant and self._max_tenant_share is not None and own >= self._max_tenant_share:
            raise Overloaded(
                f"{own} calls of this tenant to {self._name} text are pending and at most "
                f"{self._max_tenant_share} may be; try again later",
                pending_calls=own,
                max_pending_calls=self._max_tenant_share,
            )
        if self._max_pending is not None and total >= self._max_pending:
            raise Overloaded(
                f"{total} calls to {self._name} text are pending and at most {self._max_pending} may be; "
                "try again later",
                pending_calls=total,
                max_pending_calls=self._max_pending,
            )

    def _forget(self, tenant: str) -> None:
        self._pending[tenant] -= 1
        if not self._pending[tenant]:
            del self._pending[tenant]  # names of tenants come and go

    def close(self) -> None:
        """Begin nothing more; what runs goes on to its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
