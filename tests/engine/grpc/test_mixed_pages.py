"""16-bit pages beside quantized ones, on the demo model over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from octavo.engine import AsyncEngine, EngineConfig
from octavo.engine.api.errors import InvalidRequest
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
    """``score``: log probability of its tokens together; ``cached``: tokens of the prompt that were."""

    tokens: tuple[int, ...]
    score: float
    cached: int


async def answer(client: Client, quantize_after: int | None = None) -> Answer:
    params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=0, quantize_after=quantize_after)
    delta = (await collect(client.generate(PROMPT, params)))[0]
    return Answer(delta.token_ids, sum(drawn.logprob for drawn in delta.logprobs), delta.cached_tokens)


async def test_a_request_may_say_after_how_many_tokens_it_is_quantized() -> None:
    async with serving() as (client, _, _):
        dense = await answer(client)
        with pytest.raises(InvalidRequest, match="no 16-bit pages beside quantized ones"):
            await answer(client, quantize_after=8)
    async with serving(kv_format="fp4", residual_pages=1, num_residual_pages=40) as (client, engine, metrics):
        mixed = await answer(client)
        assert mixed.cached == 0
        assert await answer(client) == replace(mixed, cached=192)
        unquantized = await answer(client, quantize_after=270)
        assert unquantized.cached == 0, "pages of another number are computed otherwise"
        assert await answer(client, quantize_after=270) == replace(unquantized, cached=192)
        assert await answer(client, quantize_after=0) == replace(mixed, cached=192), "the server's own number"
        assert unquantized.tokens == dense.tokens
        assert abs(unquantized.score - dense.score) < 0.01 < abs(mixed.score - dense.score)
        with pytest.raises(InvalidRequest, match=r"pool with quantize_after 3000 holds 320;"):
            await client_long(client)
        await eventually(lambda: all_idle(engine), "pages come back")
        stats = await client.cache.stats()
        assert_all_idle(stats, 40)
        assert b'octavo_kv_residual_pages{state="held"} 0.0' in metrics.render()


async def client_long(client: Client) -> None:
    params = SamplingParams(max_tokens=200, quantize_after=3000)
    await collect(client.generate(PROMPT, params))


def assert_all_idle(stats: cache_pb2.GetStatsResponse, num_residual: int) -> None:
    residual = stats.residual_pages
    assert residual.held == 0
    assert residual.idle_cached + residual.idle_empty == num_residual
    assert residual.idle_cached > 0, "those of the requests that were read in 16 bits alone"
