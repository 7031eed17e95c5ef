from __future__ import annotations

import asyncio
import contextlib
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

import psutil

SAMPLE_S = 0.1
PROBE_S = 0.5
PROBE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Memory:
    """Resident bytes of the server and its child processes."""

    before: int = 0
    peak: int = 0
    after: int = 0


def resident(pid: int) -> int:
    """Return resident bytes of a process and its descendants; 0 if the process has ended."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += each.memory_info().rss
    return total


class Observer:
    def __init__(self, pid: int, metrics: str) -> None:
        self._pid = pid
        self._url = f"http://{metrics}/healthz"
        self._metrics = f"http://{metrics}/metrics"
        self.memory = Memory(before=resident(pid))
        self.worst_probe = 0.0
        self.wrong: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._sample()), asyncio.create_task(self._probe())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def settle(self, *, allowed: int, patience: float) -> None:
        end = time.monotonic() + patience
        while True:
            self.memory.after = resident(self._pid)
            if self.memory.after <= self.memory.before + allowed or time.monotonic() > end:
                return
            await asyncio.sleep(SAMPLE_S)

    async def at_rest(self, *, patience: float) -> list[str]:
        end = time.monotonic() + patience
        while True:
            held = _held(await asyncio.to_thread(_fetch, self._metrics))
            if not held or time.monotonic() > end:
                return [f"{count} {kind} are held at rest" for kind, count in held.items()]
            await asyncio.sleep(SAMPLE_S)

    async def counters(self) -> dict[str, float]:
        text = await asyncio.to_thread(_fetch, self._metrics)
        return {name: float(value) for name, value in re.findall(r"^([^# ]\S*) (\S+)$", text, re.MULTILINE)}

    async def _sample(self) -> None:
        while True:
            self.memory.peak = max(self.memory.peak, await asyncio.to_thread(resident, self._pid))
            await asyncio.sleep(SAMPLE_S)

    async def _probe(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await asyncio.to_thread(_fetch, self._url)
            except (OSError, urllib.error.URLError) as error:
                if not self.wrong:
                    self.wrong.append(f"/healthz: {error}")
            self.worst_probe = max(self.worst_probe, time.monotonic() - began)
            await asyncio.sleep(PROBE_S)


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S) as reply:
        return str(reply.read().decode())


def _held(metrics: str) -> dict[str, int]:
    found = re.findall(r'^octavo_holders\{kind="(\w+)"\} ([\d.]+)$', metrics, re.MULTILINE)
    assert found, "the server says nothing of what it holds"
    counts = {kind: int(float(count)) for kind, count in found}
    return {kind: count for kind, count in counts.items() if count and kind != "pinned_pages"}
