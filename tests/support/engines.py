from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from fakes import FakeCore, Recording, small_config
from octavo.engine import AsyncEngine, Delta, EngineConfig
from octavo.engine.api.output_collector import OutputCollector
from oracle import Expected


class Gate:
    """A gate that lets the engine's thread take a limited number of steps."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._open = False
        self.is_waiting = False

    def __call__(self) -> None:
        if not self._open:
            self.is_waiting = True
            assert self._permits.acquire(timeout=30), "the test let nothing through"
            self.is_waiting = False

    def allow(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._permits.release()

    def open(self) -> None:
        self._open = True
        self._permits.release()


class SlowSteps(Gate):
    def __call__(self) -> None:
        time.sleep(0.002)


@contextlib.asynccontextmanager
async def running(
    config: EngineConfig | None = None, gate: Gate | None = None, **options: object
) -> AsyncIterator[tuple[AsyncEngine, FakeCore, Recording]]:
    fake = FakeCore(before_step=gate, **options)  # type: ignore[arg-type]
    observer = Recording()
    engine = AsyncEngine(config or small_config(), core_factory=fake, observer=observer)
    await engine.start()
    try:
        yield engine, fake, observer
        if gate is not None:
            gate.open()
        await until(lambda: engine.gauges().pages_held == 0)
        assert fake.core is not None
        fake.core._blocks.check()
    finally:
        if gate is not None:
            gate.open()
        await engine.stop()
    assert fake.runner is not None
    assert fake.runner.closed


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.002)


async def turns() -> None:
    """Let the event loop run pending callbacks."""
    for _ in range(20):
        await asyncio.sleep(0)


async def collect(stream: AsyncGenerator[Delta, None]) -> dict[int, Expected]:
    merged: dict[int, OutputCollector] = {}
    async for delta in stream:
        merged.setdefault(delta.index, OutputCollector()).add(delta)
    wholes = {index: collector.take() for index, collector in merged.items()}
    return {
        index: Expected(list(delta.token_ids), delta.text, delta.finish_reason, delta.stop_match)
        for index, delta in wholes.items()
    }
