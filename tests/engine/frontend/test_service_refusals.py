from __future__ import annotations

import asyncio

import pytest

from engines import Gate, collect, running, until
from fakes import small_config
from octavo.engine import (
    AsyncEngine,
    FinishReason,
    InvalidRequest,
    Overloaded,
    QueueTimeout,
    RequestTooLong,
    SamplingParams,
)
from octavo.engine.api import config as settings


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("", {}, InvalidRequest, "prompt is empty; give at least one token"),
        ([], {}, InvalidRequest, "prompt is empty"),
        ([1, 258], {}, InvalidRequest, r"prompt must have token ids in \[0, 258\), got 258"),
        ([-1], {}, InvalidRequest, "got -1"),
        ([1, "a"], {}, InvalidRequest, "text, token ids or chat messages"),
        ([1.5], {}, InvalidRequest, "text, token ids or chat messages"),
        (3, {}, InvalidRequest, "a prompt must be text, .* got 3"),
        (None, {}, InvalidRequest, "a prompt must be text, .* got None"),
        (b"ab", {}, InvalidRequest, "a prompt must be text, .* got b'ab'"),
        ({"prompt": "ab"}, {}, InvalidRequest, "a prompt must be text, .* got {'prompt': 'ab'}"),
        ("a\udcff", {}, InvalidRequest, "got lone surrogates"),
        ([{"role": "user"}], {}, InvalidRequest, "message 0 must have a role and a content"),
        ([1], {"stop_ids": (999,)}, InvalidRequest, "stop_ids must have token ids .* got 999"),
        ([1], {"logit_bias": {-3: 1.0}}, InvalidRequest, "logit_bias must have token ids .* got -3"),
        (
            [1],
            {"min_tokens": 1, "stop_ids": tuple(range(258))},
            InvalidRequest,
            "any first token would end the output",
        ),
        ([1], {"min_tokens": 1, "stop_ids": (*range(256), 257)}, InvalidRequest, "all 258 tokens .* end"),
        ([1] * 256, {}, RequestTooLong, "256 tokens and max_tokens 1 need 257 .* page pool holds 256"),
        ([1] * 200, {"max_tokens": 57}, RequestTooLong, "200 tokens and max_tokens 57 need 257"),
        ([1] * 300, {}, RequestTooLong, "model's length is 280; shorten the prompt or lower max_tokens"),
    ],
)
async def test_refusals_contain_the_numbers(
    prompt: list[int], params: dict[str, object], error: type[Exception], message: str
) -> None:
    async with running(max_model_len=280) as (engine, fake, observer):
        with pytest.raises(error, match=message) as caught:
            await anext(engine.generate(prompt, SamplingParams(**params)))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
        assert observer.reasons == ["too_long" if error is RequestTooLong else "invalid"]
        assert fake.runner is not None
        assert not fake.runner.num_steps


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


async def test_each_sample_takes_a_place_in_the_queue() -> None:
    async def samples(engine: AsyncEngine, n: int) -> int:
        params = SamplingParams(max_tokens=2, n=n)
        return len({delta.index async for delta in engine.generate([1], params)})

    config = small_config(max_running=2, max_waiting=3)
    async with running(config) as (engine, _, _):
        assert await samples(engine, 6) == 6, "a request is let in if no other is unfinished"
    gate = Gate()
    async with running(config, gate) as (engine, _, _):
        first = asyncio.create_task(samples(engine, 4))
        await until(lambda: bool(engine._open.streams()))
        with pytest.raises(
            Overloaded, match="4 requests are unfinished \\(each sample counts\\), but at most 5"
        ):
            await samples(engine, 2)
        last = asyncio.create_task(samples(engine, 1))
        await asyncio.sleep(0)
        gate.open()
        assert [await each for each in (first, last)] == [4, 1]
        assert await samples(engine, 5) == 5, "all places are free again"


async def test_prompts_that_wait_are_counted_in_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr(settings, "MAX_WAITING_TOKENS", 100)
    config = small_config(max_running=1, max_waiting=9)
    async with running(config, gate) as (engine, _, observer):
        short = SamplingParams(max_tokens=2)
        first = asyncio.create_task(collect(engine.generate([1] * 120, short)))
        await asyncio.sleep(0)
        gate.allow(1)
        await until(lambda: engine.gauges().num_running == 1)
        others = [asyncio.create_task(collect(engine.generate([2] * 60, short)))]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=r"60 prompt tokens are waiting, and the 41 .* 100") as caught:
            await anext(engine.generate([3] * 41))
        assert caught.value.numbers == {"waiting_tokens": 60, "max_waiting_tokens": 100}
        others.append(asyncio.create_task(collect(engine.generate([3] * 40, short))))
        await asyncio.sleep(0)
        assert observer.reasons == ["overloaded"]
        gate.open()
        await asyncio.gather(first, *others)


async def test_a_long_prompt_is_accepted_into_an_empty_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "MAX_WAITING_TOKENS", 10)
    async with running(small_config()) as (engine, _, _):
        assert await collect(engine.generate([1] * 100, SamplingParams(max_tokens=1)))


async def test_only_waiting_requests_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    config = small_config(max_running=1, queue_timeout=30)
    async with running(config, gate) as (engine, _, observer):
        runs = asyncio.create_task(collect(engine.generate([1], SamplingParams(max_tokens=3))))
        await asyncio.sleep(0)
        gate.allow(1)
        await until(lambda: engine.gauges().num_running == 1)
        limiter = engine._open.limiter
        (first,) = limiter._timers.values()
        monkeypatch.setattr(limiter, "_timeout_s", 0.2)
        with pytest.raises(QueueTimeout, match=r"not admitted within 0.2 s \(queue_timeout\)"):
            await anext(engine.generate([2]))
        assert observer.reasons == ["queue_timeout"]
        assert not first.cancelled()
        first._run()
        gate.open()
        assert (await runs)[0].finish_reason is FinishReason.LENGTH
        await until(lambda: engine.gauges().num_waiting == 0)
        assert not engine._open.limiter._timers


@pytest.mark.parametrize("name", ["target_itl", "target_ttft"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_targets_are_above_0_and_finite(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be above 0 milliseconds, got"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


async def test_a_priority_out_of_range_is_refused() -> None:
    async with running() as (engine, _, _):
        with pytest.raises(InvalidRequest, match="priority must be between -1000 and 1000, got 1001"):
            await anext(engine.generate([1], priority=1001))


async def test_requests_that_just_fit_are_served() -> None:
    async with running() as (engine, _, _):
        for params in (
            SamplingParams(stop_ids=tuple(range(258)), max_tokens=2),
            SamplingParams(min_tokens=1, stop_ids=tuple(range(256)), ignore_eos=True, max_tokens=2),
        ):
            assert await collect(engine.generate([1], params))
