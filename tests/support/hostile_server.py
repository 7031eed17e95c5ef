"""A server that refuses every call and measures its cost, in a separate process.

    LD_PRELOAD=LIBRARY python hostile_server.py

Prints its gRPC and HTTP addresses. LIBRARY is built from counted_allocations.c.
The line "begin" starts a measurement; each line is answered by JSON: ``loop_ms``, CPU time of the
longest callback, and ``growth``, peak bytes."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import sys
import time
from asyncio import events
from typing import Any

from fakes import FakeCore, small_config
from http_served import beside
from octavo.engine.api import config as settings
from octavo.engine.api.errors import Overloaded
from octavo.engine.frontend.request_limiter import RequestLimiter
from octavo.engine.frontend.text_executor import TextExecutor
from served import served

MODEL_LEN = 4_000_000  # no prompt is too long
MAX_MESSAGE = 16 << 20


class LoopMeter:
    """The longest callback of any event loop, in CPU seconds."""

    def __init__(self) -> None:
        self.longest = 0.0
        run = events.Handle._run

        def measured(handle: events.Handle) -> Any:
            began = time.thread_time()
            try:
                return run(handle)
            finally:
                self.longest = max(self.longest, time.thread_time() - began)

        events.Handle._run = measured  # type: ignore[method-assign,assignment]


def counter(name: str) -> Any:
    function = getattr(ctypes.CDLL(None), name)
    function.restype = ctypes.c_long
    return function


def refuse_everything() -> None:
    def refuse(*_: object) -> None:
        raise Overloaded("nothing is admitted here")

    run = TextExecutor.run

    async def run_little(self: Any, tenant: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        if self._name == "convert" and getattr(function, "__name__", "") not in ("answers", "parse"):
            refuse()
        return await run(self, tenant, function, *args, **kwargs)

    RequestLimiter.check = refuse  # type: ignore[method-assign,assignment]
    TextExecutor.run = run_little  # type: ignore[method-assign]


def answer(meter: LoopMeter) -> None:
    """Answer input lines with reports, outside of the event loop, which is measured."""
    gc.freeze()
    before, reset_most, most = 0, counter("octavo_reset_most"), counter("octavo_most")
    for line in sys.stdin:
        if line.strip() == "begin":
            gc.collect()
            before, meter.longest = reset_most(), 0.0
        print(json.dumps({"loop_ms": meter.longest * 1e3, "growth": most() - before}), flush=True)


async def main() -> None:
    refuse_everything()
    core = FakeCore(max_model_len=MODEL_LEN, verify=False)
    settings.MAX_WAITING_TOKENS = 2**40
    config = small_config(max_pinned_pages=8)
    async with (
        served(core, config=config, max_message_bytes=MAX_MESSAGE) as its,
        beside(its.server, max_body_bytes=MAX_MESSAGE) as (_, http),
    ):
        print(its.address, http, flush=True)
        await asyncio.to_thread(answer, LoopMeter())


if __name__ == "__main__":
    asyncio.run(main())
