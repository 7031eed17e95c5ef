"""The asyncio edge over a ledger core: streams, cancellation, refusals, drain and death."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import pytest

from fakes import FakeCore, Recording, byte_tokenizer, small_config
from octavo.engine import (
    AsyncEngine,
    Delta,
    EngineConfig,
    EngineDead,
    EngineStopping,
    FinishReason,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
    RequestTooLong,
    SamplingParams,
)
from octavo.engine.core import EngineCore
from octavo.engine.service import LONG_PROMPT
from octavo.engine.stats import Observer
from oracle import Expected, alone


class Gate:
    """Lets the engine's thread take so many steps and no more."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._open = False

    def __call__(self) -> None:
        if not self._open:
            assert self._permits.acquire(timeout=30), "the test let nothing through"

    def allow(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._permits.release()

    def open(self) -> None:
        self._open = True
        self._permits.release()


class SlowSteps(Gate):
    """Every step takes a while, however fast the machine is."""

    def __call__(self) -> None:
        time.sleep(0.002)


@contextlib.asynccontextmanager
async def running(
    config: EngineConfig | None = None, gate: Gate | None = None, **options: object
) -> AsyncIterator[tuple[AsyncEngine, FakeCore, Recording]]:
    """A started engine, which must be idle and balanced at the end."""
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
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came true")


async def turns() -> None:
    """Let the event loop do what it has been told, such as to close a stream."""
    for _ in range(20):
        await asyncio.sleep(0)


async def collect(stream: AsyncGenerator[Delta, None]) -> dict[int, Expected]:
    """What each sample said in the end."""
    merged: dict[int, Delta] = {}
    async for delta in stream:
        merged[delta.index] = merged[delta.index].merge(delta) if delta.index in merged else delta
    return {
        index: Expected(list(delta.token_ids), delta.text, delta.finish_reason, delta.stop_match)
        for index, delta in merged.items()
    }


async def test_many_streams_at_once_say_what_each_says_alone() -> None:
    prompts = [b"shared beginning, then %d" % k for k in range(20)]
    params = [
        SamplingParams(max_tokens=5 + k, n=1 + k % 3, temperature=k % 2, seed=k, stop=("ab", " c"))
        for k in range(20)
    ]
    async with running() as (engine, _, _):
        results = await asyncio.gather(
            *(
                collect(engine.generate(list(prompt), each))
                for prompt, each in zip(prompts, params, strict=True)
            )
        )
    for prompt, each, result in zip(prompts, params, results, strict=True):
        assert result == {index: alone(list(prompt), each, index=index) for index in range(each.n)}


async def test_text_ids_and_chat_are_prompts() -> None:
    params = SamplingParams(max_tokens=8)
    messages = [{"role": "user", "content": "hé"}]
    async with running(
        max_model_len=100_000, config=small_config(num_pages=20_000, max_step_tokens=8192), verify=False
    ) as (
        engine,
        _,
        _,
    ):
        for prompt, ids in (
            ("hé", list("hé".encode())),
            ([1, 2, 3], [1, 2, 3]),
            (messages, list("<user>hé\n<assistant>".encode())),
            ("x" * (LONG_PROMPT + 1), list(b"x" * (LONG_PROMPT + 1))),
        ):
            assert await collect(engine.generate(prompt, params)) == {0: alone(ids, params)}


# How far a request of 40 prompt tokens in chunks of 8, and 30 to generate, gets in so many steps.
STATES = {"submitted": 0, "prefilling": 2, "last chunk": 4, "decoding": 9}


@pytest.mark.parametrize("how", ["cancel", "abort"])
@pytest.mark.parametrize("state", STATES)
async def test_whoever_gives_up_gets_no_more_than_one_step(state: str, how: str) -> None:
    gate = Gate()
    async with running(small_config(max_step_tokens=8), gate) as (engine, fake, observer):
        deltas: list[Delta] = []

        async def read() -> None:
            async for delta in engine.generate([7] * 40, SamplingParams(max_tokens=30), request_id="r"):
                deltas.append(delta)

        task = asyncio.create_task(read())
        await until(lambda: "r" in engine._streams)
        gate.allow(STATES[state])
        assert fake.runner is not None
        await until(lambda: fake.runner.num_steps == STATES[state])  # type: ignore[union-attr]
        await until(lambda: sum(len(delta.token_ids) for delta in deltas) >= STATES[state] - 4)
        if how == "abort":
            await engine.abort("r")
            gate.allow(1)
            await task
            assert deltas[-1].finish_reason is FinishReason.ABORT
        else:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            gate.allow(1)
        await until(lambda: any(record.ended for record in observer.records))
        assert engine.gauges().pages_held == 0
        assert fake.runner.num_steps <= STATES[state] + 1
        assert await collect(engine_after(engine, gate)) == {0: alone([7] * 40, SamplingParams(max_tokens=3))}


def engine_after(engine: AsyncEngine, gate: Gate) -> AsyncGenerator[Delta, None]:
    """The same id again: it is free at once, and nothing of the first request is in its way."""
    gate.open()
    return engine.generate([7] * 40, SamplingParams(max_tokens=3), request_id="r")


async def test_a_request_that_waits_can_be_given_up_too() -> None:
    gate = Gate()
    async with running(small_config(max_running=1), gate) as (engine, _, observer):
        first = asyncio.create_task(collect(engine.generate([1] * 8, SamplingParams(max_tokens=9))))
        second = asyncio.create_task(collect(engine.generate([2] * 8, SamplingParams(max_tokens=9))))
        await until(lambda: len(engine._streams) == 2)
        gate.allow(2)
        await until(lambda: engine.gauges().num_waiting == 1)
        second.cancel()
        await turns()
        gate.open()
        assert await first == {0: alone([1] * 8, SamplingParams(max_tokens=9))}
        assert second.cancelled()
    assert [record.finish_reason for step in observer.records for record in step.ended].count(
        FinishReason.ABORT
    ) == 1


async def test_leaving_the_loop_early_ends_the_request() -> None:
    gate = Gate()
    async with running(gate=gate) as (engine, fake, observer):
        gate.allow(2)
        async for _ in engine.generate([1], SamplingParams(max_tokens=100, n=2)):
            break
        await turns()
        gate.allow(1)
        await until(lambda: any(record.ended for record in observer.records))
        assert fake.runner is not None
        assert fake.runner.num_steps <= 3


async def test_a_request_that_has_ended_can_be_given_up_without_effect() -> None:
    async with running() as (engine, _, observer):
        stream = engine.generate([1], SamplingParams(max_tokens=2), request_id="r")
        await anext(stream)
        await until(lambda: any(record.ended for record in observer.records))
        await engine.abort("r")
        await stream.aclose()
        assert [record.finish_reason for step in observer.records for record in step.ended] == [
            FinishReason.LENGTH
        ]


async def test_a_slow_reader_gets_fewer_and_larger_deltas() -> None:
    params = SamplingParams(max_tokens=100, n=2, seed=1, temperature=1, ignore_eos=True)
    async with running() as (engine, _, _):
        stream = engine.generate([1, 2], params)
        first = [await anext(stream)]
        other = await collect(engine.generate([3], SamplingParams(max_tokens=100)))
        assert other == {0: alone([3], SamplingParams(max_tokens=100))}  # nobody waits for the slow one
        await until(lambda: not engine._streams)  # all of it has arrived, unread
        rest = [delta async for delta in stream]
        assert len(rest) <= 3  # one per sample, and what may have come with the first
        for index in range(2):
            tokens = [t for delta in first + rest if delta.index == index for t in delta.token_ids]
            assert tokens == alone([1, 2], params, index=index).token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("", {}, InvalidRequest, "prompt is empty; give at least one token"),
        ([], {}, InvalidRequest, "prompt is empty"),
        ([1, 258], {}, InvalidRequest, r"prompt has token id 258, but .* \[0, 258\)"),
        ([-1], {}, InvalidRequest, "token id -1"),
        ([1, "a"], {}, InvalidRequest, "text, token ids or chat messages"),
        ([1.5], {}, InvalidRequest, "text, token ids or chat messages"),
        ([{"role": "user"}], {}, InvalidRequest, "message 0 must have a role and a content"),
        ([1], {"stop_ids": (999,)}, InvalidRequest, "stop_ids has token id 999"),
        ([1], {"logit_bias": {-3: 1.0}}, InvalidRequest, "logit_bias has token id -3"),
        ([1] * 256, {}, RequestTooLong, "256 tokens and max_tokens 1 need 257 .* page pool holds 256"),
        ([1] * 200, {"max_tokens": 57}, RequestTooLong, "200 tokens and max_tokens 57 need 257"),
        ([1] * 300, {}, RequestTooLong, "model's length is 280; shorten the prompt or lower max_tokens"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_numbers(
    prompt: list[int], params: dict[str, object], error: type[Exception], message: str
) -> None:
    async with running(max_model_len=280) as (engine, fake, observer):
        with pytest.raises(error, match=message) as caught:
            await anext(engine.generate(prompt, SamplingParams(**params)))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
        assert observer.reasons == ["too_long" if error is RequestTooLong else "invalid"]
        assert fake.runner is not None
        assert not fake.runner.num_steps


async def test_without_a_limit_a_request_goes_to_the_models_length() -> None:
    async with running(max_model_len=20) as (engine, _, _):
        result = await collect(engine.generate([1, 2, 3]))
        assert result == {0: alone([1, 2, 3], SamplingParams(), room=17)}


async def test_an_id_in_use_is_refused() -> None:
    gate = Gate()
    async with running(gate=gate) as (engine, _, _):
        task = asyncio.create_task(
            collect(engine.generate([1], SamplingParams(max_tokens=2), request_id="r"))
        )
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="'r' is in use"):
            await anext(engine.generate([1], request_id="r"))
        with pytest.raises(InvalidRequest, match="must not be empty"):
            await anext(engine.generate([1], request_id=""))
        gate.open()
        await task


async def test_a_full_queue_refuses_more() -> None:
    gate = Gate()
    config = small_config(max_running=2, max_waiting=3)
    async with running(config, gate) as (engine, _, observer):
        tasks = [
            asyncio.create_task(collect(engine.generate([1], SamplingParams(max_tokens=2)))) for _ in range(5)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="5 requests are unfinished and at most 5 may be"):
            await anext(engine.generate([1]))
        assert observer.reasons == ["overloaded"]
        gate.open()
        await asyncio.gather(*tasks)
        await collect(engine.generate([1], SamplingParams(max_tokens=2)))


async def test_stopping_lets_running_requests_finish() -> None:
    gate = Gate()
    async with running(gate=gate) as (engine, _, observer):
        params = SamplingParams(max_tokens=20)
        task = asyncio.create_task(collect(engine.generate([1], params)))
        gate.allow(3)
        await until(lambda: engine.gauges().num_running == 1)
        stop = asyncio.create_task(engine.stop(drain_timeout=30))
        await asyncio.sleep(0)
        assert not engine.is_ready
        with pytest.raises(EngineStopping, match="shutting down"):
            await anext(engine.generate([1]))
        assert observer.reasons == ["stopping"]
        gate.open()
        assert await task == {0: alone([1], params)}
        await stop


async def test_what_does_not_finish_in_time_is_aborted() -> None:
    gate = Gate()
    async with running(gate=gate) as (engine, _, _):
        task = asyncio.create_task(collect(engine.generate([1], SamplingParams(max_tokens=200, n=2))))
        gate.allow(4)
        await until(lambda: engine.gauges().num_running == 2)
        stop = asyncio.create_task(engine.stop(drain_timeout=0.05))
        await asyncio.sleep(0.2)
        gate.open()
        result = await task
        assert {sample.finish_reason for sample in result.values()} == {FinishReason.ABORT}
        await stop
        await engine.stop()


@pytest.mark.parametrize("cause", [RuntimeError("device lost"), SystemExit(3), MemoryError()])
async def test_when_the_engine_dies_everybody_hears_of_it_at_once(cause: BaseException) -> None:
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
    assert engine.death is cause
    assert not engine.is_ready
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
    assert not engine.is_ready
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


def test_the_edge_never_imports_mlx() -> None:
    code = (
        "import sys\n"
        "import octavo.engine, octavo.engine.service, octavo.engine.config, octavo.engine.batch\n"
        "import octavo.engine.core, octavo.engine.build, octavo.engine.llm\n"
        "octavo.engine.AsyncEngine, octavo.engine.LLM, octavo.engine.SamplingParams\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_lm', 'transformers')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


async def test_info_and_tokenizer_are_the_models() -> None:
    async with running() as (engine, _, _):
        assert engine.info.name == "fake"
        assert engine.tokenizer.vocab_size == byte_tokenizer().vocab_size
        assert engine.is_ready
        with pytest.raises(RuntimeError, match="was started before"):
            await engine.start()


async def test_an_id_is_free_as_soon_as_its_reader_gave_up() -> None:
    """Also before the engine knows: news of the first request never reach the second."""
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
        await until(lambda: "r" in engine._streams)
        gate.open()
        assert await second == {0: alone([2], params)}


async def test_only_requests_of_the_same_salt_share_pages() -> None:
    async with running() as (engine, _, _):
        found = []
        for salt in (b"", b"a", b"b", b"a", b""):
            async for delta in engine.generate([7] * 9, SamplingParams(max_tokens=1), salt=salt):
                found.append(delta.cached_tokens)
        assert found == [0, 0, 0, 8, 8]
