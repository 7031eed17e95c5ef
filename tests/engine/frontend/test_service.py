from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from engines import Gate, collect, running, turns, until
from fakes import small_config
from octavo.engine import AsyncEngine, Delta, FinishReason, SamplingParams
from octavo.engine.frontend.input_processor import LONG_TEXT
from oracle import alone


async def test_concurrent_streams_equal_streams_served_alone() -> None:
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
    ) as (engine, _, _):
        for prompt, ids in (
            ("hé", list("hé".encode())),
            ([1, 2, 3], [1, 2, 3]),
            (messages, list("<user>hé\n<assistant>".encode())),
            ("x" * (LONG_TEXT + 1), list(b"x" * (LONG_TEXT + 1))),
        ):
            assert await collect(engine.generate(prompt, params)) == {0: alone(ids, params)}


# Number of engine steps until each state, for 40 prompt tokens in chunks of 8.
STATES = {"submitted": 0, "prefilling": 2, "last chunk": 4, "decoding": 9}


@pytest.mark.parametrize("how", ["cancel", "abort"])
@pytest.mark.parametrize("state", STATES)
async def test_a_cancelled_request_computes_at_most_one_more_step(state: str, how: str) -> None:
    gate = Gate()
    async with running(small_config(max_step_tokens=8), gate) as (engine, fake, observer):
        deltas: list[Delta] = []

        async def read() -> None:
            async for delta in engine.generate([7] * 40, SamplingParams(max_tokens=30), request_id="r"):
                deltas.append(delta)

        task = asyncio.create_task(read())
        await until(lambda: engine._open.find("r") is not None)
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
    gate.open()
    return engine.generate([7] * 40, SamplingParams(max_tokens=3), request_id="r")


async def test_a_request_that_waits_can_be_given_up_too() -> None:
    gate = Gate()
    async with running(small_config(max_running=1), gate) as (engine, _, observer):
        first = asyncio.create_task(collect(engine.generate([1] * 8, SamplingParams(max_tokens=9))))
        second = asyncio.create_task(collect(engine.generate([2] * 8, SamplingParams(max_tokens=9))))
        await until(lambda: len(engine._open.streams()) == 2)
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


async def test_a_slow_reader_gets_fewer_and_larger_deltas() -> None:
    params = SamplingParams(max_tokens=100, n=2, seed=1, temperature=1, ignore_eos=True)
    async with running() as (engine, _, _):
        stream = engine.generate([1, 2], params)
        first = [await anext(stream)]
        other = await collect(engine.generate([3], SamplingParams(max_tokens=100)))
        assert other == {0: alone([3], SamplingParams(max_tokens=100))}
        await until(lambda: not engine._open.streams())
        rest = [delta async for delta in stream]
        assert len(rest) <= 3
        for index in range(2):
            tokens = [t for delta in first + rest if delta.index == index for t in delta.token_ids]
            assert tokens == alone([1, 2], params, index=index).token_ids
