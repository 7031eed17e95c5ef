from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from ..api.errors import EngineDead, InvalidConfig

READY = "octavo ready:"


class ServerProcess:
    """An ``octavo serve`` process, as in ``async with ServerProcess(["--model", "demo"]) as server``.

    By default it listens on free local ports. At exit it gets SIGTERM, then SIGKILL after ``stop_timeout``.

    ready       fields of the ready line: grpc, metrics, model, backend, kv, pages
    returncode  exit code after the end
    """

    def __init__(
        self, flags: Sequence[str], *, stop_timeout: float = 60.0, launcher: Sequence[str] = ()
    ) -> None:
        local = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--log-level", "warning"]
        self._command = [*launcher, sys.executable, "-m", "octavo.engine.cli", "serve", *local, *flags]
        self._stop_timeout = stop_timeout
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._ready_line: asyncio.Future[str] | None = None
        self.ready: dict[str, str] = {}
        self.last_errors: deque[str] = deque(maxlen=20)

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Wait until the server is ready. Raises InvalidConfig or EngineDead if it does not start."""
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        assert process.stdout is not None
        assert process.stderr is not None
        self._ready_line = asyncio.get_running_loop().create_future()
        self._readers = [
            asyncio.create_task(self._read_output(process.stdout)),
            asyncio.create_task(self._read_errors(process.stderr)),
        ]
        try:
            line = await self._ready_line
        except EOFError:
            code = await process.wait()
            await asyncio.wait(self._readers)
            words = self.last_errors[-1] if self.last_errors else "no message"
            words = words.removeprefix("octavo serve: error: ")
            if code == 2:
                raise InvalidConfig(words) from None
            raise EngineDead(f"the server exited with status {code}: {words}") from None
        except asyncio.CancelledError:
            await self.stop()
            raise
        self.ready = dict(word.split("=", 1) for word in line.removeprefix(READY).split())

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "not started"
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def stop(self) -> int:
        """Drain and end the server; return its exit code."""
        self.signal(signal.SIGTERM)
        return await self.wait()

    async def wait(self) -> int:
        """Wait at most ``stop_timeout`` for the server's end; return its exit code."""
        assert self._process is not None, "not started"
        try:
            await asyncio.wait_for(self._process.wait(), self._stop_timeout)
        except TimeoutError:
            self._process.kill()
        code = await self._process.wait()
        await asyncio.wait(self._readers)
        return code

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _read_output(self, stream: asyncio.StreamReader) -> None:
        assert self._ready_line is not None
        async for line in stream:
            if line.startswith(READY.encode()) and not self._ready_line.done():
                self._ready_line.set_result(line.decode())
        if not self._ready_line.done():
            self._ready_line.set_exception(EOFError("no ready line"))

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            self.last_errors.append(line.decode(errors="replace").rstrip())
