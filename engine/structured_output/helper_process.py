"""Helper processes, which protect the engine from hostile input.

Both sides send JSON objects over a socket. A message may be followed by bytes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

_PATIENCE_S = 1.0  # seconds for a process to end after its socket was closed


class HelperEnded(Exception): ...


class HelperLate(Exception):
    """The helper process did not answer in time."""


class HelperUnavailable(Exception):
    """The helper process did not start, or ended unexpectedly."""


class HelperProcess:
    """Owns one helper process, which starts at the first use.

    module   Python module that the process runs
    setup    first message, which the process answers when it is ready
    start_s  seconds for the first answer
    """

    def __init__(self, module: str, setup: dict[str, Any], start_s: float) -> None:
        self.num_started = 0
        self._module, self._setup, self._start_s = module, setup, start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_closed = False

    def interrupt(self) -> None:
        """End the process. Thread-safe."""
        if (process := self._process) is not None:
            process.kill()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        if self._is_closed:
            raise HelperUnavailable("the engine was stopped")
        try:
            self._spawn()
            self.num_started += 1
            if self._is_closed:
                self.interrupt()
            answer = self._ask(self._setup, self._start_s)
        except (OSError, HelperEnded, HelperLate) as error:
            status = self._end()
            raise HelperUnavailable(
                f"the helper process did not start: {error} (exit status {status})"
            ) from error
        if (reason := answer.get("refused")) is not None:
            self._end()
            raise HelperUnavailable(f"the helper process did not start: {reason}")

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._connection = Connection(ours.detach())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # keeps a terminal's Ctrl-C from the process
            )

    def _ask(self, message: dict[str, Any], seconds: float, *more: bytes) -> dict[str, Any]:
        """Return the answer to a message; ``"bytes"`` has the bytes that follow it. Raises HelperEnded, or
        HelperLate after it has killed the process."""
        connection = self._connection
        assert connection is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            self.interrupt()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True  # or it would hold up the end of this process
        timer.start()
        try:
            send(connection, message, *more)
            return next(received(connection))
        except (OSError, StopIteration) as error:
            if late.is_set():
                raise HelperLate(f"this took more than {seconds:g} s") from error
            raise HelperEnded("the helper process ended") from error
        finally:
            timer.cancel()

    def _end(self) -> int:
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if process is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=_PATIENCE_S)
        process.kill()
        return process.wait()


def send(connection: Connection, message: dict[str, Any], *more: bytes) -> None:
    connection.send_bytes(json.dumps(message | {"is_followed": True} if more else message).encode())
    for each in more:
        connection.send_bytes(each)


def received(connection: Connection) -> Iterator[dict[str, Any]]:
    """Yield the messages until the other side closes the socket; ``"bytes"`` has the bytes that follow."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            message: dict[str, Any] = json.loads(connection.recv_bytes())
            if message.pop("is_followed", False):
                message["bytes"] = connection.recv_bytes()
            yield message
