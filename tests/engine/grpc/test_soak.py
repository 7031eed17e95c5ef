from __future__ import annotations

import asyncio
import contextlib
import gc
import random

import psutil
import pytest

from octavo.engine import AsyncEngine, EngineConfig, FinishReason, SamplingParams
from octavo.engine.api.stats import Observer, StepRecord

pytestmark = pytest.mark.server

NUM_REQUESTS = 1000
WARM_UP = 300  # requests before memory is measured, because allocators and caches grow first
NUM_PAGES = 48  # too few for all requests, to cause preemption and eviction
CONCURRENCY = 24
GROWTH_BYTES = 16 * 1024**2

SYSTEM = "Ledger of the harbour office, kept in good order by the clerk. "


async def visit(engine: AsyncEngine, rng: random.Random) -> FinishReason | None:
    long = rng.random() < 0.05
    prompt = SYSTEM * rng.randint(0, 3) + "Once upon a time " * rng.randint(1, 60 if long else 4)
    params = SamplingParams(
        max_tokens=rng.randint(1, 40),
        n=rng.choice([1, 1, 1, 3]),
        temperature=rng.choice([0.0, 0.8]),
        top_k=rng.choice([0, 20]),
        stop=rng.choice([(), (".",), ("\n\n", " the")]),
        repetition_penalty=rng.choice([1.0, 1.1]),
        logprobs=rng.choice([None, None, 2]),
        ignore_eos=rng.random() < 0.3,
    )
    reason: FinishReason | None = None
    patience = rng.choice([None, None, 0.0, 0.02, 0.2])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience):
            async for delta in engine.generate(prompt, params):
                reason = delta.finish_reason or reason
            return reason
    return None


async def serve(engine: AsyncEngine, rng: random.Random, num_requests: int) -> list[FinishReason | None]:
    left = iter(range(num_requests))
    reasons: list[FinishReason | None] = []

    async def reader() -> None:
        for _ in left:
            reasons.append(await visit(engine, rng))

    await asyncio.gather(*(reader() for _ in range(CONCURRENCY)))
    while engine.gauges().pages_held:
        await asyncio.sleep(0.005)
    return reasons


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


class Counter(Observer):
    def __init__(self) -> None:
        self.num_preemptions = 0
        self.num_evicted = 0

    def step(self, record: StepRecord) -> None:
        self.num_preemptions += record.preemptions
        self.num_evicted += record.evicted_pages

    def rejected(self, reason: str) -> None:
        raise AssertionError(f"a request was refused: {reason}")


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_thousand_requests_leave_every_page_idle_and_memory_flat() -> None:
    rng = random.Random(11)
    counter = Counter()
    config = EngineConfig(
        kv_format="fp4", page_size=16, num_pages=NUM_PAGES, max_running=16, max_step_tokens=256
    )
    engine = AsyncEngine(config, observer=counter)
    await engine.start()
    try:
        reasons = await serve(engine, rng, WARM_UP)
        before = resident_bytes()
        reasons += await serve(engine, rng, NUM_REQUESTS - WARM_UP)
        grown = resident_bytes() - before
        gauges = engine.gauges()
    finally:
        await engine.stop()
    print(f"resident memory grew by {grown / 2**20:.1f} MiB over {NUM_REQUESTS - WARM_UP} requests")
    assert len(reasons) == NUM_REQUESTS
    assert {FinishReason.STOP, FinishReason.LENGTH, None} == set(reasons)
    assert (gauges.num_running, gauges.num_waiting, gauges.pages_held) == (0, 0, 0)
    assert gauges.pages_idle_cached + gauges.pages_idle_empty == NUM_PAGES
    assert counter.num_preemptions > 0
    assert counter.num_evicted > 0
    assert grown < GROWTH_BYTES
