"""JSON messages over a pipe: four bytes of length, big-endian, then the text."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

_LENGTH = struct.Struct(">I")


def packed(message: dict[str, Any]) -> bytes:
    content = json.dumps(message).encode()
    return _LENGTH.pack(len(content)) + content


class MessageReader:
    """Assembles messages from bytes of a pipe."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> dict[str, Any] | None:
        """Return the next whole message, or None."""
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        content = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        message: dict[str, Any] = json.loads(content)
        return message


def write_all(fd: int, data: bytes) -> None:
    """Write all data to a blocking pipe."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
