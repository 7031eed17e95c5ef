from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from engines import until
from octavo.engine.api.errors import Overloaded
from octavo.engine.frontend.text_executor import NUM_THREADS, TextExecutor


@pytest.fixture
def door() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def test_more_than_may_be_pending_are_refused(door: threading.Event) -> None:
    texts = TextExecutor("convert", max_pending=4, max_tenant_share=3)
    tasks = [asyncio.create_task(texts.run("alice", door.wait, 30)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=r"3 calls of this tenant to convert text .* at most 3"):
        await texts.run("alice", door.wait)
    tasks.append(asyncio.create_task(texts.run("bob", door.wait, 30)))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=r"4 calls to convert text .* at most 4") as caught:
        await texts.run("bob", door.wait)
    assert caught.value.numbers == {"pending_calls": 4, "max_pending_calls": 4}
    door.set()
    assert await asyncio.gather(*tasks) == [True] * 4
    await until(lambda: texts.num_pending == 0)
    assert await texts.run("alice", lambda: 1) == 1
    texts.close()


async def test_without_tenants_there_are_no_shares(door: threading.Event) -> None:
    texts = TextExecutor("convert", max_pending=4, max_tenant_share=1)
    tasks = [asyncio.create_task(texts.run("", door.wait, 30)) for _ in range(4)]
    await asyncio.sleep(0)
    door.set()
    assert await asyncio.gather(*tasks) == [True] * 4
    texts.close()


async def test_running_calls_count_after_their_caller_has_left(door: threading.Event) -> None:
    texts = TextExecutor("convert", max_pending=NUM_THREADS + 1)
    running, started = [], threading.Semaphore(0)

    def work() -> None:
        started.release()
        door.wait(30)

    for _ in range(NUM_THREADS):
        running.append(asyncio.create_task(texts.run("", work)))
    await asyncio.sleep(0)
    for _ in range(NUM_THREADS):
        assert await asyncio.to_thread(started.acquire, timeout=30)
    waiting = asyncio.create_task(texts.run("", work))
    await asyncio.sleep(0)
    for task in (*running, waiting):
        task.cancel()
    await asyncio.wait([*running, waiting])
    await until(lambda: texts.num_pending == NUM_THREADS)
    door.set()
    await until(lambda: texts.num_pending == 0)
    texts.close()


async def test_errors_of_the_function_are_raised() -> None:
    texts = TextExecutor("convert")
    with pytest.raises(ZeroDivisionError):
        await texts.run("", lambda: 1 // 0)
    texts.close()
