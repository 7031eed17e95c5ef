"""Cost of refused calls, measured on a server in another process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import hostile_server

MAX_LOOP_MS = 5.0
TRIES = 10
Call: TypeAlias = Callable[[], Awaitable[str]]  # makes a call; returns how it ended


class Child:
    def __init__(self, process: asyncio.subprocess.Process, address: str, http: str) -> None:
        self._process = process
        self.address = address
        self.http = http

    async def ask(self, word: str) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(word.encode() + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), 60)
        found: dict[str, float] = json.loads(line)
        return found


@asynccontextmanager
async def child(folder: Path) -> AsyncIterator[Child]:
    preload = folder / "counted_allocations.so"
    source = Path(hostile_server.__file__).with_name("counted_allocations.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", preload, source], check=True)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(hostile_server.__file__)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={
            "PYTHONPATH": str(Path(hostile_server.__file__).parent),
            "LD_PRELOAD": str(preload),
            "PYTHONMALLOC": "malloc",  # otherwise memory of Python's allocator would not be counted
        },
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield Child(process, *line.decode().split())
    finally:
        process.kill()
        await process.wait()


class Harness:
    """Finds calls that cost too much. The minimum of several tries counts, because first uses cost more."""

    def __init__(self, server: Child) -> None:
        self._server = server
        self._receiving_ms = 0.0

    async def begin(self, receiving: Call) -> None:
        reports = [(await self._measure(receiving))[1] for _ in range(TRIES)]
        self._receiving_ms = min(report["loop_ms"] for report in reports)

    async def excess(self, call: Call, *, size: int, most: float) -> str:
        loop_ms = growth = float("inf")
        for _ in range(TRIES):
            status, report = await self._measure(call)
            loop_ms = min(loop_ms, report["loop_ms"] - self._receiving_ms)
            growth = min(growth, report["growth"] / size)
            if loop_ms <= MAX_LOOP_MS and growth <= most:
                return ""
        return f"{loop_ms:.1f} ms on the event loop, {growth:.1f} times the message ({status:.80})"

    async def _measure(self, call: Call) -> tuple[str, dict[str, float]]:
        await self._server.ask("begin")
        status = await call()
        return status, await self._server.ask("end")
