from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from engines import until
from octavo.engine.api.errors import Overloaded
from octavo.engine.api.tenant import NO_TENANT, Tenant
from octavo.engine.frontend.text_executor import NUM_THREADS, TextExecutor

ALICE, BOB = Tenant("alice", 0.75), Tenant("bob", 0.75)


@pytest.fixture
def door() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def test_more_than_may_be_pending_are_refused(door: threading.Event) -> None:
    texts = TextExecutor("convert", max_pending=4)
    tasks = [asyncio.create_task(texts.run(ALICE, door.wait, 30)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="3 calls to convert text are pending, but at most 3 of one"):
        await texts.run(ALICE, door.wait)
    tasks.append(asyncio.create_task(texts.run(BOB, door.wait, 30)))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=r"4 calls to convert text .* at most 4") as caught:
        await texts.run(BOB, door.wait)
    assert caught.value.numbers == {"pending_calls": 4, "max_pending_calls": 4}
    door.set()
    assert await asyncio.gather(*tasks) == [True] * 4
    await until(lambda: texts.pending.total == 0)
    assert await texts.run(ALICE, lambda: 1) == 1
    texts.close()


async def test_running_calls_count_after_their_caller_has_left(door: threading.Event) -> None:
    texts = TextExecutor("convert", max_pending=NUM_THREADS + 1)
    running, started = [], threading.Semaphore(0)

    def work() -> None:
        started.release()
        door.wait(30)

    for _ in range(NUM_THREADS):
        running.append(asyncio.create_task(texts.run(NO_TENANT, work)))
    await asyncio.sleep(0)
    for _ in range(NUM_THREADS):
        assert await asyncio.to_thread(started.acquire, timeout=30)
    waiting = asyncio.create_task(texts.run(NO_TENANT, work))
    await asyncio.sleep(0)
    for task in (*running, waiting):
        task.cancel()
    await asyncio.wait([*running, waiting])
    await until(lambda: texts.pending.total == NUM_THREADS)
    door.set()
    await until(lambda: texts.pending.total == 0)
    texts.close()


async def test_errors_of_the_function_are_raised() -> None:
    texts = TextExecutor("convert")
    with pytest.raises(ZeroDivisionError):
        await texts.run(NO_TENANT, lambda: 1 // 0)
    texts.close()
