"""How many requests may be unfinished, how many tokens may queue, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from ..api.config import EngineConfig
from ..api.errors import (
    EngineStopping,
    InvalidRequest,
    Overloaded,
    QueueTimeout,
    RequestTooLong,
)
from ..core.request import Request
from .stream import Stream


class Gate:
    """Refuses what the engine could not begin in time. Lives on the event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self._max_unfinished = config.max_running + config.max_waiting
        self._max_tokens = config.max_waiting_tokens
        self._timeout_s = config.queue_timeout
        self._timers: dict[Request, asyncio.TimerHandle] = {}

    def check(self, requests: Collection[Request], num_prompt: int = 0) -> None:
        """Overloaded if one more request, of ``num_prompt`` tokens, is too much beside ``requests``. A
        prompt that nobody waits before is let in however long it is."""
        if len(requests) >= self._max_unfinished:
            raise Overloaded(
                f"{len(requests)} requests are unfinished and at most {self._max_unfinished} may be "
                "(max_running + max_waiting); try again later",
                unfinished_requests=len(requests),
                max_unfinished_requests=self._max_unfinished,
            )
        if not num_prompt or self._max_tokens is None:
            return
        waiting = sum(request.num_prompt for request in requests if request.started_at is None)
        if waiting and waiting + num_prompt > self._max_tokens:
            raise Overloaded(
                f"{waiting} prompt tokens are waiting, with the {num_prompt} of this request there would be "
                f"more than {self._max_tokens} (max_waiting_tokens); try again later",
                waiting_tokens=waiting,
                max_waiting_tokens=self._max_tokens,
            )

    def watch(self, stream: Stream, abort: Callable[[Request], None]) -> None:
        """End the stream with QueueTimeout, and ``abort`` its request, if that waits for too long."""
        if self._timeout_s is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._timeout_s, self._expire, stream, abort)
            self._timers[stream.request] = timer

    def forget(self, request: Request) -> None:
        """It has ended."""
        if (timer := self._timers.pop(request, None)) is not None:
            timer.cancel()

    def _expire(self, stream: Stream, abort: Callable[[Request], None]) -> None:
        request = stream.request
        self._timers.pop(request, None)
        if request.started_at is None and not stream.ended:
            abort(request)
            stream.fail(
                QueueTimeout(
                    f"the request waited for {self._timeout_s:g} s and was not begun (queue_timeout); "
                    "try again later, or another server"
                )
            )


def refusal_label(error: Exception) -> str:
    """The label under which a refusal is counted."""
    for kind, label in (
        (RequestTooLong, "too_long"),
        (InvalidRequest, "invalid"),
        (QueueTimeout, "queue_timeout"),
        (Overloaded, "overloaded"),
        (EngineStopping, "stopping"),
    ):
        if isinstance(error, kind):
            return label
    return "dead"
