from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, TypeAlias

from pydantic_core import to_json

from ..api.tenant import Tenant
from ..frontend.holders import Holders
from ..grpc.request_handler import ResponseWriter
from .errors import HttpRefusal, error_form, headers_of, status_of

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Take: TypeAlias = Callable[[int], None]

BODY_TIMEOUT_S = 60.0  # seconds to receive a body
PIECE_BYTES = 64 * 2**10  # bytes per write
JSON_TYPES = (b"application/json", b"text/json")
CONTENT_TYPE = b"content-type"
ABORT = "octavo.abort"


def json_of(answer: object, **parts: bytes | None) -> bytes:
    """Return an object as JSON."""
    data = to_json(answer, inf_nan_mode="null")
    for name, value in parts.items():
        if value is not None:
            before, key, after = data.partition(f'"{name}":'.encode())
            empty = b"[]" if after.startswith(b"[]") else b"null"
            assert after.startswith(empty), f"{name} must be empty"
            data = b"".join((before, key, value, after[len(empty) :]))
    return data


def json_list(items: Iterable[bytes]) -> bytes:
    return b"[%b]" % b",".join(items)


class ClientGone(Exception): ...


class ByteBudget:
    """Limit on the bytes that requests hold, for all requests and for each tenant."""

    def __init__(self, what: str, max_one: int, max_total: int, *, status: int, remedy: str) -> None:
        self.holders = Holders("bytes", f"bytes of {what}s are held", max_total)
        self._what = what
        self._max_one = max_one
        self._status = status
        self._remedy = remedy

    @contextlib.contextmanager
    def hold(self, tenant: Tenant) -> Iterator[Take]:
        """Yield a function that adds bytes to the budget. Raises HttpRefusal or Overloaded above a limit."""
        size = 0

        def take(num_bytes: int) -> None:
            nonlocal size
            self.check(size + num_bytes)
            self.holders.take(tenant, num_bytes)
            size += num_bytes

        try:
            yield take
        finally:
            self.holders.give_back(tenant, size)

    def check(self, num_bytes: int) -> None:
        """Raise HttpRefusal if a single request may not have this size."""
        if num_bytes > self._max_one:
            raise HttpRefusal(
                self._status,
                f"a{'n' * (self._what[0] == 'a')} {self._what} must have at most {self._max_one} bytes, got "
                f"at least {num_bytes}; {self._remedy}",
            )


class Exchange:
    """An ASGI request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, writer: ResponseWriter) -> None:
        self.scope = scope
        self.is_started = False
        self._is_events = False
        self._is_gone = False
        self._receive = receive
        self.write = send
        self._writer = writer
        self._headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        if (key := self.header("x-api-key")) and not self.header("authorization"):  # Anthropic's clients
            self._headers.append(("authorization", f"Bearer {key}"))
        self.request_id = self.header("x-request-id")
        self.error_form = error_form(scope["path"])

    def invocation_metadata(self) -> list[tuple[str, str]]:
        """Return the headers as gRPC metadata."""
        return self._headers

    def header(self, name: str) -> str:
        return next((value for key, value in self._headers if key == name), "")

    async def body(self, budget: ByteBudget, take: Take) -> bytes:
        """Read a JSON body within the budget."""
        kind = self.header("content-type").partition(";")[0].strip().lower().encode()
        if kind not in JSON_TYPES:
            raise HttpRefusal(
                415,
                f"content-type must be application/json, got {kind.decode() or 'none'}; set it and send JSON",
            )
        if (coding := self.header("content-encoding").strip().lower()) not in ("", "identity"):
            raise HttpRefusal(
                415, f"content-encoding must be left out, got {coding:.60}; send the body uncompressed"
            )
        declared = self.header("content-length")
        budget.check(int(declared) if declared.isdigit() else 0)
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece = message.get("body", b"")
                    take(len(piece))
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError:
            raise HttpRefusal(
                408, f"a body must arrive within {BODY_TIMEOUT_S:g} s, got a part; send it without pauses"
            ) from None

    @contextlib.asynccontextmanager
    async def until_gone(self) -> AsyncIterator[None]:
        """Cancel the block and raise ClientGone if the client disconnects."""
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(self._watch(task))
        try:
            yield
        except asyncio.CancelledError:
            if self._is_gone and not task.uncancel():
                raise ClientGone from None
            raise
        finally:
            watch.cancel()

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        task.cancel()

    async def answer(self, answer: object, *, status: int = 200) -> None:
        await self.answer_bytes(json_of(answer), status=status)

    async def answer_bytes(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: bytes = b"application/json",
        more_headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        headers = [(CONTENT_TYPE, content_type), (b"content-length", str(len(body)).encode())]
        await self._start(status, [*headers, *more_headers])
        for start in range(0, max(len(body), 1), PIECE_BYTES):
            if start:
                await asyncio.sleep(0)
            end = start + PIECE_BYTES
            await self._write_body(body[start:end], more=end < len(body))

    async def start_events(self) -> None:
        self._is_events = True
        await self._start(
            200,
            [
                (CONTENT_TYPE, b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ],
        )

    async def event(self, data: object, *, name: str = "") -> None:
        """Send one event. ``data`` is an object, or JSON text without line breaks."""
        head = f"event: {name}\n".encode() if name else b""
        written = data if isinstance(data, bytes) else json_of(data)
        await self._write_body(b"%bdata: %b\n\n" % (head, written), more=True)

    async def end_events(self, last: bytes = b"data: [DONE]\n\n") -> None:
        await self._write_body(last, more=False)

    async def refuse(self, error: Exception) -> None:
        """Send an error response, or end a stream with an error event."""
        form = self.error_form
        body = form.body(error)
        if not self.is_started:
            await self.answer_bytes(json_of(body), status=status_of(error), more_headers=headers_of(error))
        elif self._is_events:
            await self.event(body, name=form.event)
            await self.end_events(form.last)
        else:
            await self.abort()

    async def abort(self) -> None:
        """Close the connection and drop unsent data."""
        if (abort := self.scope.get(ABORT)) is not None:
            abort()
        await asyncio.sleep(0)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.is_started = True
        message = {"type": "http.response.start", "status": status, "headers": headers}
        await self._writer.write(self, message)

    async def _write_body(self, body: bytes, *, more: bool) -> None:
        await self._writer.write(self, {"type": "http.response.body", "body": body, "more_body": more})
