from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import Gate, collect, running, until
from fakes import small_config
from octavo.engine import Delta, Overloaded, SamplingParams
from octavo.engine.api import config as settings
from octavo.engine.api.engine_request import CacheNamespace, EngineRequest
from octavo.engine.api.stats import Gauges
from octavo.engine.api.tenant import Tenant
from octavo.engine.frontend.async_engine import AsyncEngine
from octavo.engine.frontend.request_limiter import WaitingPrompts

ALICE, BOB, CAROL = (Tenant(name, 0.5) for name in ("alice", "bob", "carol"))
TWO = SamplingParams(max_tokens=2, ignore_eos=True)


@given(st.floats(0.001, 1), st.integers(0, 10_000))
def test_a_share_is_at_least_one_and_never_more_than_there_are(share: float, total: int) -> None:
    part = Tenant("a", share).part_of(total)
    assert min(1, total) <= part <= total
    assert part <= max(1, total * share)
    assert Tenant().part_of(total) == total


class Senders:
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.tasks: list[asyncio.Task[object]] = []

    async def send(self, tenant: Tenant, prompt: list[int]) -> None:
        task: asyncio.Task[object] = asyncio.create_task(collect(self.stream(tenant, prompt)))
        num_open = len(self._engine._open.streams())
        await until(lambda: task.done() or len(self._engine._open.streams()) > num_open)
        if task.done():
            await task
        self.tasks.append(task)

    def stream(self, tenant: Tenant, prompt: list[int]) -> AsyncGenerator[Delta, None]:
        return self._engine.generate(prompt, TWO, tenant=tenant)


async def test_a_tenant_has_its_share_of_the_queue_and_others_have_theirs() -> None:
    gate = Gate()
    config = small_config(max_running=2, max_waiting=6)  # 8 requests in all, 4 per tenant
    async with running(config, gate=gate) as (engine, _, observer):
        senders = Senders(engine)
        for _ in range(4):
            await senders.send(ALICE, [1, 2, 3])
        with pytest.raises(
            Overloaded, match=r"4 requests of this tenant .* at most 4 .* share of 8"
        ) as caught:
            await senders.send(ALICE, [1, 2, 3])
        assert caught.value.numbers == {"unfinished_requests": 4, "max_unfinished_requests": 4}
        assert observer.reasons == ["overloaded"]
        for _ in range(4):
            await senders.send(BOB, [1, 2, 3])
        with pytest.raises(Overloaded, match="8 requests are unfinished"):
            await senders.send(CAROL, [1, 2, 3])
        gate.open()
        await asyncio.gather(*senders.tasks)
        await senders.send(ALICE, [1, 2, 3])
        await asyncio.gather(*senders.tasks)
        assert not engine._open.limiter._tenant_samples


async def test_each_sample_counts_against_the_share() -> None:
    gate = Gate()
    config = small_config(max_running=2, max_waiting=6)  # 8 requests in all, 4 per tenant
    many = SamplingParams(max_tokens=2, ignore_eos=True, n=3)
    async with running(config, gate=gate) as (engine, _, _):
        first = asyncio.create_task(collect(engine.generate([1, 2], many, tenant=ALICE)))
        await until(lambda: bool(engine._open.streams()))
        with pytest.raises(Overloaded, match=r"3 requests of this tenant .*each sample counts"):
            await collect(engine.generate([1, 2], replace(many, n=2), tenant=ALICE))
        others = [engine.generate([1, 2], TWO, tenant=ALICE), engine.generate([1], many, tenant=BOB)]
        rest = [asyncio.create_task(collect(each)) for each in others]
        gate.open()
        assert [len(each) for each in await asyncio.gather(first, *rest)] == [3, 1, 3]
        large = await collect(engine.generate([1, 2], replace(many, n=6), tenant=ALICE))
        assert len(large) == 6, "the only one of its tenant"


async def test_a_tenant_has_its_share_of_the_tokens_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr(settings, "MAX_WAITING_TOKENS", 100)
    config = small_config(max_running=1, max_waiting=20)
    async with running(config, gate=gate) as (engine, _, _):
        senders = Senders(engine)
        await senders.send(BOB, [9])
        (begun,) = engine._open.streams()
        await until(lambda: begun.request.number in engine.gauges().begun)
        await senders.send(ALICE, [1] * 30)
        with pytest.raises(Overloaded, match=r"30 prompt tokens of this .* and the 30 .* exceed 50"):
            await senders.send(ALICE, [1] * 30)
        await senders.send(ALICE, [1] * 20)
        await senders.send(BOB, [2] * 50)
        with pytest.raises(Overloaded, match="100 prompt tokens are waiting"):
            await senders.send(CAROL, [2])
        gate.open()
        await asyncio.gather(*senders.tasks)


async def test_refused_or_cancelled_requests_free_their_place() -> None:
    gate = Gate()
    config = small_config(max_running=1, max_waiting=3)
    async with running(config, gate=gate) as (engine, _, _):
        senders = Senders(engine)
        for _ in range(2):
            await senders.send(ALICE, [1, 2, 3])
        for task in senders.tasks:
            task.cancel()
        await asyncio.gather(*senders.tasks, return_exceptions=True)
        with pytest.raises(ValueError, match="prompt is empty"):
            await senders.send(ALICE, [])
        assert not engine._open.limiter._tenant_samples
        senders.tasks.clear()
        for _ in range(2):
            await senders.send(ALICE, [1, 2, 3])
        gate.open()
        await asyncio.gather(*senders.tasks)


async def test_without_tenants_there_are_no_shares() -> None:
    gate = Gate()
    async with running(small_config(max_running=1, max_waiting=3), gate=gate) as (engine, _, _):
        senders = Senders(engine)
        for _ in range(4):
            await senders.send(Tenant(), [1, 2, 3])
        gate.open()
        await asyncio.gather(*senders.tasks)


def test_waiting_tokens_are_counted_until_the_first_step_or_the_end() -> None:
    gauges = Gauges()
    waiting = WaitingPrompts(lambda: gauges)
    requests = [
        EngineRequest(
            request_id=str(size),
            prompt_ids=[1] * size,
            params=TWO,
            max_tokens=2,
            arrived_at=0.0,
            namespace=CacheNamespace(name),
        )
        for size, name in ((3, "a"), (4, "a"), (5, "b"))
    ]
    for request in requests:
        waiting.add(request)
    assert (waiting.num_tokens, waiting.num_tokens_of("a"), waiting.num_tokens_of("c")) == (12, 7, 0)
    gauges = Gauges(begun=frozenset({requests[0].number}))
    assert (waiting.num_tokens, waiting.num_tokens_of("a")) == (9, 4)
    gauges = Gauges()
    for request in requests[:2]:
        waiting.forget(request.number)
    assert (waiting.num_tokens, waiting.num_tokens_of("a"), waiting.num_tokens_of("b")) == (5, 0, 5)
