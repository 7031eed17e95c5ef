"""HTTP/2 frames written by hand, for input that client libraries never send."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
CANCEL = 8


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def begin(**settings: int) -> bytes:
    window = settings.get("window")
    payload = b"" if window is None else struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
    return PREFACE + frame(SETTINGS, 0, 0, payload)


def call(stream: int, path: str, metadata: Sequence[tuple[str, str]] = ()) -> bytes:
    """Return gRPC call headers as literals without indexing, so no state is needed."""
    headers = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *metadata,
    )
    block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers)
    return frame(HEADERS, END_HEADERS, stream, block)


def reset(stream: int) -> bytes:
    return frame(RESET, 0, stream, struct.pack(">I", CANCEL))


def message(stream: int, data: bytes) -> bytes:
    return frame(DATA, END_STREAM, stream, b"\x00" + struct.pack(">I", len(data)) + data)


def _text(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127, "longer ones need a prefix of several bytes"
    return bytes([len(data)]) + data


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.seen: dict[int, int] = {}
        self.is_closed = False
        self._drain = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, address: str, *, source: str | None = None, **settings: int) -> Connection:
        host, _, port = address.rpartition(":")
        local = None if source is None else (source, 0)
        made = cls(*await asyncio.open_connection(host, int(port), local_addr=local))
        await made.send(begin(**settings))
        return made

    async def send(self, data: bytes) -> None:
        """Send, unless the other side has closed the connection."""
        if not self.is_closed:
            self._writer.write(data)
            try:
                await self._writer.drain()
            except ConnectionError:
                self.is_closed = True

    async def close(self) -> None:
        self._drain.cancel()
        await asyncio.wait((self._drain,))
        self._writer.close()

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self.seen[head[3]] = self.seen.get(head[3], 0) + 1
                if head[3] == SETTINGS and not head[4] & ACK:
                    await self.send(frame(SETTINGS, ACK, 0))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_closed = True
