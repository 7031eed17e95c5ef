"""The streams of every request that has not ended, and what waits for them to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..api.config import EngineConfig
from ..core.request import Request, Update
from .request_limiter import Gate
from .stream import Stream


class OpenStreams:
    """From a request's admission until its last delta has come, or nobody listens. Lives on the
    event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self._interval = config.stream_interval
        self._gate = Gate(config)
        self._by_id: dict[str, Stream] = {}
        self._by_request: dict[Request, Stream] = {}  # an id may be used again, a request is not
        self._none_left = asyncio.Event()

    def check_room(self, num_prompt: int = 0) -> None:
        """Overloaded when a request with a prompt of ``num_prompt`` tokens is one too many."""
        self._gate.check(self._by_request.keys(), num_prompt)

    def add(self, request: Request, give_up: Callable[[Request], None]) -> Stream:
        """A stream for a request; ``give_up`` ends it when it has waited too long to be begun."""
        stream = Stream(request, self.forget, interval=self._interval)
        self._by_id[request.request_id] = stream
        self._by_request[request] = stream
        self._gate.watch(stream, give_up)
        self._none_left.clear()
        return stream

    def find(self, request_id: str) -> Stream | None:
        return self._by_id.get(request_id)

    def streams(self) -> tuple[Stream, ...]:
        """Those that are open now."""
        return tuple(self._by_id.values())

    def push(self, updates: list[Update]) -> None:
        """Hand on what is new to who listens."""
        for update in updates:
            if (stream := self._by_request.get(update.request)) is not None:  # else nobody listens now
                stream.push(update.delta)

    def forget(self, stream: Stream) -> None:
        """It has ended, or nobody reads it any more."""
        self._gate.forget(stream.request)
        del self._by_request[stream.request]
        del self._by_id[stream.request.request_id]
        if not self._by_id:
            self._none_left.set()

    async def all_ended(self) -> None:
        """Wait until no stream is open."""
        while self._by_id:
            self._none_left.clear()
            await self._none_left.wait()
