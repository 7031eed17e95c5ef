from __future__ import annotations

import asyncio
import contextlib
import random
import threading

import pytest

from engines import Gate, SlowSteps, collect, running, until
from fakes import FakeCore, Recording, small_config
from octavo.engine import (
    AsyncEngine,
    EngineConfig,
    EngineDead,
    EngineStopping,
    FinishReason,
    ModelLoadError,
    SamplingParams,
)
from octavo.engine.api.stats import Observer
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.engine_thread import EngineThread
from octavo.engine.frontend import async_engine
from oracle import alone


async def test_stopping_lets_running_requests_finish() -> None:
    gate = Gate()
    async with running(gate=gate) as (engine, _, observer):
        params = SamplingParams(max_tokens=20)
        task = asyncio.create_task(collect(engine.generate([1], params)))
        gate.allow(3)
        await until(lambda: engine.gauges().num_running == 1)
        stop = asyncio.create_task(engine.stop(drain_timeout=30))
        await asyncio.sleep(0)
        with pytest.raises(EngineStopping, match="shutting down"):
            await anext(engine.generate([1]))
        assert observer.reasons == ["stopping"]
        gate.open()
        assert await task == {0: alone([1], params)}
        await stop


async def test_an_engine_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "ABORT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(async_engine, "STOP_TIMEOUT_S", 0.05)
    gate = Gate()
    async with running(gate=gate) as (engine, _, _):
        stream = engine.generate([1], SamplingParams(max_tokens=5))
        first = asyncio.create_task(anext(stream))
        await until(lambda: gate.is_waiting)
        await asyncio.wait_for(engine.stop(), 20)
        with pytest.raises(EngineStopping, match="was stopped"):
            await first
        assert isinstance(engine._client, EngineThread)
        assert engine._client._thread.is_alive()
        monkeypatch.undo()
        gate.open()


@pytest.mark.parametrize("cause", [RuntimeError("device lost"), SystemExit(3), MemoryError()])
async def test_a_dead_engine_fails_all_requests_at_once(cause: BaseException) -> None:
    gate = Gate()

    def step() -> None:
        gate()
        if dying.is_set():
            raise cause

    dying = threading.Event()
    observer = Recording()
    engine = AsyncEngine(small_config(), core_factory=FakeCore(before_step=step), observer=observer)
    await engine.start()
    tasks = [
        asyncio.create_task(collect(engine.generate([k], SamplingParams(max_tokens=50)))) for k in range(12)
    ]
    unread = engine.generate([1], SamplingParams(max_tokens=50))
    gate.allow(2)
    await anext(unread)
    dying.set()
    gate.open()
    for task in tasks:
        with pytest.raises(EngineDead, match="must be restarted") as caught:
            await task
        assert caught.value.__cause__ is cause
    with pytest.raises(EngineDead):
        await anext(unread)
    assert engine.dead_error is cause
    with pytest.raises(EngineDead) as late:
        await anext(engine.generate([1]))
    assert late.value.__cause__ is cause
    assert observer.reasons == ["dead"]
    await engine.stop(drain_timeout=30)
    await engine.stop()


async def test_a_model_that_cannot_be_loaded_is_the_error_of_start() -> None:
    def broken(_config: EngineConfig, _observer: Observer | None) -> EngineCore:
        raise ModelLoadError("no such model")

    engine = AsyncEngine(small_config(), core_factory=broken)
    with pytest.raises(EngineStopping, match="has not been started"):
        await anext(engine.generate([1]))
    with pytest.raises(ModelLoadError, match="no such model"):
        await engine.start()
    await engine.stop()


async def test_starting_can_be_cancelled() -> None:
    loading, may_load = threading.Event(), threading.Event()
    fake = FakeCore()

    def slow(config: EngineConfig, observer: Observer | None) -> EngineCore:
        loading.set()
        assert may_load.wait(30)
        return fake(config, observer)

    engine = AsyncEngine(small_config(), core_factory=slow)
    start = asyncio.create_task(engine.start())
    await until(loading.is_set)
    start.cancel()
    may_load.set()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert fake.runner is not None
    assert fake.runner.closed


async def test_a_hundred_readers_that_come_and_go_leave_nothing_behind() -> None:
    rng = random.Random(5)
    config = small_config(num_pages=40, max_waiting=200)
    async with running(config, SlowSteps()) as (engine, _, observer):

        async def visit(k: int) -> None:
            await asyncio.sleep(rng.random() * 0.2)
            params = SamplingParams(max_tokens=rng.randint(1, 30), n=rng.randint(1, 3), seed=k, temperature=1)
            prompt = [rng.randint(0, 3) for _ in range(rng.randint(1, 40))]
            patience = rng.choice([0.0, 0.01, 0.05, 60])
            with contextlib.suppress(TimeoutError):
                result = await asyncio.wait_for(collect(engine.generate(prompt, params)), patience)
                assert result == {index: alone(prompt, params, index=index) for index in range(params.n)}

        await asyncio.gather(*(visit(k) for k in range(100)))
        await until(lambda: engine.gauges().pages_held == 0)
        ended = [record.finish_reason for step in observer.records for record in step.ended]
        assert FinishReason.ABORT in ended
        assert FinishReason.LENGTH in ended


async def test_an_id_is_free_as_soon_as_its_reader_gave_up() -> None:
    gate = Gate()
    async with running(gate=gate) as (engine, _, _):
        first = asyncio.create_task(
            collect(engine.generate([1], SamplingParams(max_tokens=9), request_id="r"))
        )
        gate.allow(2)
        await until(lambda: engine.gauges().num_running == 1)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        params = SamplingParams(max_tokens=9, temperature=1, seed=3)
        second = asyncio.create_task(collect(engine.generate([2], params, request_id="r")))
        await until(lambda: engine._open.find("r") is not None)
        gate.open()
        assert await second == {0: alone([2], params)}
