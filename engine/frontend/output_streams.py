"""The streams of every request that has not ended, and what waits for them to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..api.config import EngineConfig
from ..api.errors import SlowReader
from ..core.request import Request, Update
from .request_limiter import RequestLimiter
from .stream import Stream, UnreadOutput

MAX_UNREAD_LIMITS = 2  # times max_unread_bytes: streams end beyond that


class OutputStreams:
    """From a request's admission until its last delta has come, or nobody listens. Lives on the
    event loop.

    limiter   decides who is let in
    """

    def __init__(self, config: EngineConfig, *, abort: Callable[[Request], None]) -> None:
        """``abort`` ends a request in the engine."""
        self._interval = config.stream_interval
        self._unread = UnreadOutput()
        self._max_unread_bytes = config.max_unread_bytes
        self._abort = abort
        self._by_id: dict[str, Stream] = {}
        self._by_request: dict[Request, Stream] = {}  # an id may be used again, a request is not
        self._read: set[Stream] = set()  # that somebody reads, ended ones included
        self._none_left = asyncio.Event()
        self.limiter = RequestLimiter(config, self._by_request.keys(), self._unread)

    def add(
        self, request: Request, give_up: Callable[[Request], None], *, final_only: bool = False
    ) -> Stream:
        """A stream for a request; ``give_up`` ends it when it has waited too long to be begun."""
        stream = Stream(
            request, self.forget, interval=self._interval, final_only=final_only, unread=self._unread
        )
        self._by_id[request.request_id] = stream
        self._by_request[request] = stream
        self._read.add(stream)
        self.limiter.watch(stream, give_up)
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
        while self._unread.num_bytes > MAX_UNREAD_LIMITS * self._max_unread_bytes:
            if not self._end_least_read():
                break

    def _end_least_read(self) -> bool:
        """End the stream with the most unread output; False when none has any."""
        stream = max(self._read, key=lambda stream: stream.num_pending_bytes)
        if not (num_bytes := stream.num_pending_bytes):
            return False
        if not stream.ended:
            self._abort(stream.request)
        stream.fail(
            SlowReader(
                f"{num_bytes} bytes of this request's output are unread, and of all requests more than "
                f"{MAX_UNREAD_LIMITS} times the {self._max_unread_bytes} of max_unread_bytes; read faster",
                unread_bytes=num_bytes,
            )
        )
        return True

    def forget(self, stream: Stream) -> None:
        """It has ended, or nobody reads it any more."""
        self.limiter.forget(stream.request)
        del self._by_request[stream.request]
        del self._by_id[stream.request.request_id]
        if not self._by_id:
            self._none_left.set()

    def close(self, stream: Stream) -> None:
        """Its reader has left, having read all of it or not."""
        self._read.discard(stream)
        stream.close()

    async def all_ended(self) -> None:
        """Wait until no stream is open."""
        while self._by_id:
            self._none_left.clear()
            await self._none_left.wait()
