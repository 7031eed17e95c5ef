from __future__ import annotations

import asyncio
import time
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .exchange import ABORT

MAX_HEADER_BYTES = 64 * 2**10  # bytes of a request's headers and path
MAX_PIPELINED = 8  # requests waiting for an earlier response
MAX_PIECES = 1024  # chunks of less than PIECE_BYTES in one body
PIECE_BYTES = 64
HEADER_TIMEOUT_S = 10.0  # seconds to receive all headers
IDLE_TIMEOUT_S = 120.0  # seconds between requests, and before the first


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits. The server calls ``sweep`` about once per second."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = time.monotonic()
        self._header_bytes = 0
        self._is_in_headers = True
        self._num_pieces = self._body_bytes = 0
        self._unsent = 0
        self._unsent_since = self._since

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read or answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def idle_since(self) -> float:
        return self._since

    @property
    def num_unsent(self) -> int:
        """Bytes that the client has not read."""
        try:
            return self.transport.get_write_buffer_size()
        except AttributeError:
            return 0

    def data_received(self, data: bytes) -> None:
        if self._is_in_headers:
            if not self._header_bytes:
                self._since = time.monotonic()
            self._header_bytes += len(data)
        super().data_received(data)
        if self._is_in_headers and self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"headers must have at most {MAX_HEADER_BYTES} bytes; send fewer")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True
        cast(dict[str, Any], self.scope)[ABORT] = self.transport.abort

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:
            super().on_header(name, value)
        else:
            self._count_piece(0)

    def on_headers_complete(self) -> None:
        self._is_in_headers, self._header_bytes = False, 0
        self._num_pieces = self._body_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")  # the parser closes the connection
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._count_piece(len(body))
        super().on_body(body)

    def _count_piece(self, num_bytes: int) -> None:
        self._num_pieces += 1
        self._body_bytes += num_bytes
        if self._num_pieces > MAX_PIECES + self._body_bytes // PIECE_BYTES:
            raise ValueError("too many small chunks, or trailers")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._since = time.monotonic()
        self._is_in_headers = True

    def send_400_response(self, msg: str) -> None:
        if self.is_idle:
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def sweep(self, now: float, write_timeout_s: float) -> None:
        """Close the connection if it is idle for too long or its client is too slow."""
        unsent = self.num_unsent
        if not unsent or unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        elif now - self._unsent_since > write_timeout_s:
            self.transport.abort()
            return
        if not self.is_idle or self.transport.is_closing():
            return
        limit = HEADER_TIMEOUT_S if self._header_bytes else IDLE_TIMEOUT_S
        if now - self._since > limit:
            self.transport.abort() if self._header_bytes else self.transport.close()
