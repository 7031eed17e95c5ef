from __future__ import annotations

import asyncio
import threading

import pytest

from engines import until
from octavo.engine.grpc.octavo_v1 import cache
from octavo.engine.grpc.octavo_v1.cache import SnapshotWorker


def num_threads() -> int:
    return sum(thread.name == "octavo-snapshots" for thread in threading.enumerate())


async def test_calls_take_turns_and_the_thread_leaves_when_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "IDLE_S", 0.01)
    worker, running = SnapshotWorker(), 0

    def call() -> str:
        nonlocal running
        running += 1
        assert running == 1
        running -= 1
        return threading.current_thread().name

    before = num_threads()
    assert set(await asyncio.gather(*(worker.run(call) for _ in range(50)))) == {"octavo-snapshots"}
    await until(lambda: num_threads() == before)
    assert await worker.run(call) == "octavo-snapshots", "another one comes when it is needed again"


async def test_a_call_that_nobody_waits_for_any_more_is_left_out_or_finished() -> None:
    worker, held, began, ran = SnapshotWorker(), threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        began.set()
        assert held.wait(20)
        ran.append("first")

    def fails() -> None:
        raise OSError("the disk is full")

    calls = [asyncio.ensure_future(worker.run(first))]
    await until(began.is_set)
    calls.append(asyncio.ensure_future(worker.run(lambda: ran.append("second"))))
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    held.set()
    with pytest.raises(OSError, match="the disk is full"):
        await worker.run(fails)
    assert ran == ["first"]
