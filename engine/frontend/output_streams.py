from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..api.config import EngineConfig
from ..api.engine_request import EngineOutput, EngineRequest
from ..api.errors import Overloaded, SlowReader
from ..api.output_collector import OutputCollector, logprobs_bytes
from ..api.outputs import Delta
from ..api.stats import Gauges
from .request_limiter import MAX_UNREAD_LIMITS, RequestLimiter, UnreadOutput

CHUNK_BYTES = 256 * 1024  # bytes: limit of a merged delta
MAX_HELD_LIMITS = 2


class OutputStreams:
    """Streams of all requests. Use it only on the event loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        abort: Callable[[EngineRequest], None],
        gauges: Callable[[], Gauges],
    ) -> None:
        self._unread = UnreadOutput()
        self._abort = abort
        self._by_id: dict[str, Stream] = {}
        self._by_number: dict[int, Stream] = {}
        self._unfinished: dict[EngineRequest, None] = {}
        self._read: set[Stream] = set()
        self._none_left = asyncio.Event()
        self.limiter = RequestLimiter(config, self._unfinished.keys(), self._unread, gauges)

    def add(
        self, request: EngineRequest, give_up: Callable[[EngineRequest], None], *, final_only: bool = False
    ) -> Stream:
        stream = Stream(request, self.forget, final_only=final_only, unread=self._unread)
        self._by_id[request.request_id] = stream
        self._by_number[request.number] = stream
        self._unfinished[request] = None
        self._read.add(stream)
        self.limiter.watch(request, stream.fail, give_up)
        self._none_left.clear()
        return stream

    @property
    def num_read(self) -> int:
        return len(self._read)

    def find(self, request_id: str) -> Stream | None:
        return self._by_id.get(request_id)

    def streams(self) -> tuple[Stream, ...]:
        return tuple(self._by_id.values())

    def push(self, outputs: list[EngineOutput]) -> None:
        """Deliver deltas to their streams. End streams if too much output is unread."""
        for number, delta in outputs:
            if (stream := self._by_number.get(number)) is not None:
                stream.push(delta)
        most = MAX_UNREAD_LIMITS * self.limiter.max_unread_bytes
        while self._unread.num_bytes > most:
            if not self._end_least_read():
                break
        while self._unread.num_held_bytes > MAX_HELD_LIMITS * most:
            self._end_longest()

    def _end_least_read(self) -> bool:
        stream = max(self._read, key=lambda stream: stream.num_unread_bytes)
        if not (num_bytes := stream.num_pending_bytes) or stream.is_awaited:
            return False
        text = (
            f"{num_bytes} bytes of this request's output were not read, and all requests together exceed "
            f"{MAX_UNREAD_LIMITS} times {self.limiter.max_unread_bytes}; read faster"
        )
        self._end(stream, SlowReader(text, unread_bytes=num_bytes))
        return True

    def _end_longest(self) -> None:
        stream = max(self._read, key=lambda stream: stream.num_held_bytes)
        num_bytes = stream.num_held_bytes
        assert num_bytes, "no stream holds what is counted"
        text = (
            f"{num_bytes} bytes of log probabilities wait until this request's output is complete, and all "
            "requests together have too many; request a stream, or fewer log probabilities"
        )
        self._end(stream, Overloaded(text, held_bytes=num_bytes))

    def _end(self, stream: Stream, error: Overloaded) -> None:
        if not stream.ended:
            self._abort(stream.request)
        stream.fail(error)

    def forget(self, stream: Stream) -> None:
        self.limiter.forget(stream.request)
        del self._by_number[stream.request.number]
        del self._unfinished[stream.request]
        del self._by_id[stream.request.request_id]
        if not self._by_id:
            self._none_left.set()

    def close(self, stream: Stream) -> None:
        self._read.discard(stream)
        stream.close()

    async def all_ended(self) -> None:
        """Wait until all streams have ended."""
        while self._by_id:
            self._none_left.clear()
            await self._none_left.wait()


@dataclass(eq=False)
class Stream:
    """Unread output of a request. Unread deltas of one sample are merged."""

    request: EngineRequest
    on_end: Callable[[Stream], None]
    final_only: bool = field(default=False, kw_only=True)
    unread: UnreadOutput = field(default_factory=UnreadOutput, kw_only=True)
    ended: bool = field(default=False, init=False)
    num_pending_bytes: int = field(default=0, init=False)
    num_held_bytes: int = field(default=0, init=False)
    _num_given_bytes: int = field(default=0, init=False)
    _held: dict[int, OutputCollector] = field(default_factory=dict, init=False)
    _pending: dict[int, deque[OutputCollector]] = field(default_factory=dict, init=False)
    _prompt_is_counted: bool = field(default=False, init=False)
    _error: BaseException | None = field(default=None, init=False)
    _reader: asyncio.Future[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._num_open = self.request.params.n

    @property
    def num_unread_bytes(self) -> int:
        return self.num_pending_bytes + self._num_given_bytes

    @property
    def is_awaited(self) -> bool:
        return self._reader is not None

    def push(self, delta: Delta) -> None:
        if self._error is not None:
            return
        if self.final_only:
            if (released := self._hold(delta)) is None:
                return
            delta = released
        self._keep(delta)
        if delta.finish_reason is not None:
            self._num_open -= 1
            if not self._num_open:
                self._end()
        self._wake()

    def _hold(self, delta: Delta) -> Delta | None:
        held = self._held.setdefault(delta.index, OutputCollector())
        held.add(delta)
        self._hold_bytes(logprobs_bytes(delta.logprobs))
        if not held.is_finished:
            return None
        whole = held.take()
        self._hold_bytes(-logprobs_bytes(whole.logprobs))
        return whole

    def _hold_bytes(self, num_bytes: int) -> None:
        self.num_held_bytes += num_bytes
        self.unread.num_held_bytes += num_bytes

    def _keep(self, delta: Delta) -> None:
        chunks = self._pending.setdefault(delta.index, deque())
        if not chunks or chunks[-1].num_bytes >= CHUNK_BYTES:
            chunks.append(OutputCollector())
        before = chunks[-1].num_bytes
        has_prompt = delta.prompt_logprobs is not None
        chunks[-1].add(delta, counts_prompt=not self._prompt_is_counted)
        self._prompt_is_counted = self._prompt_is_counted or has_prompt
        added = chunks[-1].num_bytes - before
        self.num_pending_bytes += added
        self.unread.num_bytes += added

    def fail(self, error: BaseException) -> None:
        """End the stream with an exception and drop unread output."""
        self._error = error
        self._drop_pending()
        self._drop_held()
        self._end()
        self._wake()

    def close(self) -> None:
        """Drop unread output because the reader has left."""
        self._drop_pending()
        self._drop_held()
        self._given(0)

    async def next(self) -> Delta | None:
        """Return the oldest unread delta, or None after the last. Only one reader is allowed."""
        self._given(0)
        while True:
            if self._error is not None:
                raise self._error
            if self._pending:
                return self._take()
            if self.ended:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def _take(self) -> Delta:
        index = next(iter(self._pending))
        chunks = self._pending[index]
        chunk = chunks.popleft()
        if not chunks:
            del self._pending[index]
        self.num_pending_bytes -= chunk.num_bytes
        self.unread.num_bytes -= chunk.num_bytes
        self._given(chunk.num_bytes)
        return chunk.take()

    def _given(self, num_bytes: int) -> None:
        self.unread.num_bytes += num_bytes - self._num_given_bytes
        self._num_given_bytes = num_bytes

    def _drop_pending(self) -> None:
        self._pending.clear()
        self.unread.num_bytes -= self.num_pending_bytes
        self.num_pending_bytes = 0

    def _drop_held(self) -> None:
        self._held.clear()
        self._hold_bytes(-self.num_held_bytes)

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self.on_end(self)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
