from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from octavo.engine import AsyncEngine, EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.client.client import Client
from octavo.engine.grpc.server import GrpcServer
from octavo.engine.observability.prometheus import Metrics
from octavo.proto import cache_pb2
from served import LOCAL, all_idle, collect, eventually

pytestmark = pytest.mark.server

PROMPT = list(range(300, 500))


@asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[tuple[Client, AsyncEngine, Metrics]]:
    config = EngineConfig(page_size=8, num_pages=100, max_running=2, max_step_tokens=32, **settings)  # type: ignore[arg-type]
    metrics = Metrics()
    engine = AsyncEngine(config, observer=metrics)
    await engine.start()
    server = GrpcServer(engine)
    address = str(await server.start(LOCAL))
    try:
        async with Client(address) as client:
            yield client, engine, metrics
    finally:
        await server.stop()


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    score: float
    cached: int


async def answer(client: Client) -> Answer:
    params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=0)
    delta = (await collect(client.generate(PROMPT, params)))[0]
    return Answer(delta.token_ids, sum(drawn.logprob for drawn in delta.logprobs), delta.cached_tokens)


async def test_the_engine_says_after_how_many_tokens_sequences_are_quantized() -> None:
    async with serving() as (client, _, _):
        dense = await answer(client)
    answers = {}
    for after in (0, 270):
        settings = {"kv_format": "fp4", "residual_pages": 1, "quantize_after": after}
        async with serving(**settings) as (client, engine, metrics):
            answers[after] = await answer(client)
            assert answers[after].cached == 0
            assert await answer(client) == replace(answers[after], cached=192)
            await eventually(functools.partial(all_idle, engine), "pages come back")
            stats = await client.cache.stats()
            assert_all_idle(stats)
            assert b'octavo_kv_residual_pages{state="held"} 0.0' in metrics.render()
    assert answers[270].tokens == dense.tokens
    assert abs(answers[270].score - dense.score) < 0.01 < abs(answers[0].score - dense.score)


def assert_all_idle(stats: cache_pb2.GetStatsResponse) -> None:
    residual = stats.residual_pages
    assert residual.held == 0
    assert residual.idle_cached + residual.idle_empty > 0
