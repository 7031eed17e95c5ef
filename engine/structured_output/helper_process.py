"""Helper processes, which protect the engine from hostile input.

A message is a big-endian length of four bytes, followed by JSON, on standard input or output.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

AnswerT = TypeVar("AnswerT")
_LENGTH = struct.Struct(">I")
_READ = 2**20


class HelperEnded(Exception): ...


class HelperLate(Exception):
    """The helper process did not answer in time."""


class HelperProcess:
    _module: str
    _patience_s = 1.0

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._got = bytearray()
        self._is_closed = False

    def interrupt(self) -> None:
        """End the process. Thread-safe."""
        if (process := self._process) is not None:
            process.kill()

    @property
    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _spawn(self) -> None:
        self._got.clear()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # keeps a terminal's Ctrl-C from the process
        )

    def _exchange(
        self, message: bytes, seconds: float, answer_in: Callable[[bytearray], AnswerT | None]
    ) -> AnswerT:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline, data = time.monotonic() + seconds, memoryview(message)
        os.set_blocking(process.stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stdin, selectors.EVENT_WRITE)
            while (answer := answer_in(self._got)) is None:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise HelperLate(f"this took more than {seconds:g} s")
                for key, _ in ready:
                    if key.fileobj is process.stdout:
                        if not (part := os.read(key.fd, _READ)):
                            raise HelperEnded("the helper process ended")
                        self._got += part
                        continue
                    try:
                        data = data[os.write(key.fd, data) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError as error:
                        raise HelperEnded("the helper process ended") from error
                    if not data:
                        selector.unregister(process.stdin)
        return answer

    def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=self._patience_s)
        process.kill()
        return process.wait()


def packed(message: dict[str, Any]) -> bytes:
    content = json.dumps(message).encode()
    return _LENGTH.pack(len(content)) + content


def next_message(got: bytearray) -> dict[str, Any] | None:
    """Remove and return the next complete message, or return None."""
    if len(got) < _LENGTH.size:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(got)[0]
    if len(got) < end:
        return None
    message: dict[str, Any] = json.loads(bytes(got[_LENGTH.size : end]))
    del got[:end]
    return message
