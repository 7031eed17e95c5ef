"""A gRPC server for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from engines import Gate
from fakes import FakeCore, small_config
from octavo.engine.api.address import Address
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.output_collector import OutputCollector
from octavo.engine.api.outputs import Delta
from octavo.engine.api.stats import Observer
from octavo.engine.client.client import Client
from octavo.engine.client.credentials import ClientCredentials
from octavo.engine.frontend.async_engine import AsyncEngine
from octavo.engine.grpc.security import Security
from octavo.engine.grpc.server import GrpcServer

LOCAL = Address("127.0.0.1", 0)
METRIC_NAMES = {
    "octavo_requests_running", "octavo_requests_waiting", "octavo_kv_pages", "octavo_kv_usage_ratio",
    "octavo_prefix_cache_query_tokens_total", "octavo_prefix_cache_hit_tokens_total",
    "octavo_prefix_cache_miss_tokens_total", "octavo_evicted_pages_total", "octavo_preemptions_total",
    "octavo_prompt_tokens_total", "octavo_generated_tokens_total", "octavo_requests_total",
    "octavo_rejected_requests_total", "octavo_step_seconds_bucket", "octavo_step_tokens_bucket",
    "octavo_time_to_first_token_seconds_bucket", "octavo_inter_token_seconds_bucket",
    "octavo_queue_seconds_bucket", "octavo_request_seconds_bucket", "octavo_build_info",
    "octavo_cache_config_info", "octavo_drafts_total", "octavo_spec_drafted_tokens_total",
    "octavo_spec_accepted_tokens_total", "octavo_requests_waiting_for_media",
    "octavo_image_encoding_seconds_bucket", "octavo_image_cache_hits_total",
}  # fmt: skip


@dataclass
class Served:
    engine: AsyncEngine
    server: GrpcServer
    core: FakeCore
    address: str
    client: Client

    def channel(self, **options: int) -> grpc.aio.Channel:
        """Open a channel with gRPC options (dots as double underscores)."""
        named = [(name.replace("__", "."), value) for name, value in options.items()]
        return grpc.aio.insecure_channel(
            self.address, options=[*named, ("grpc.use_local_subchannel_pool", 1)]
        )

    @property
    def num_steps(self) -> int:
        assert self.core.runner is not None
        return self.core.runner.num_steps


@asynccontextmanager
async def served(
    core: FakeCore | None = None,
    *,
    gate: Gate | None = None,
    observer: Observer | None = None,
    config: EngineConfig | None = None,
    security: Security | None = None,
    credentials: ClientCredentials | None = None,
    **server_options: Any,
) -> AsyncIterator[Served]:
    assert core is None or gate is None, "a core has its own gate"
    core = core or FakeCore(before_step=gate)
    engine = AsyncEngine(config or small_config(), core_factory=core, observer=observer)
    await engine.start()
    server = GrpcServer(engine, security, **server_options)
    address = str(await server.start(LOCAL))
    try:
        async with Client(address, credentials) as client:
            yield Served(engine, server, core, address, client)
    finally:
        if gate is not None:
            gate.open()
        await server.stop()


async def collect(deltas: AsyncGenerator[Delta, None]) -> dict[int, Delta]:
    return wholes([delta async for delta in deltas])


def wholes(deltas: Iterable[Delta]) -> dict[int, Delta]:
    """Join the deltas of each sample."""
    collectors: dict[int, OutputCollector] = {}
    for delta in deltas:
        collectors.setdefault(delta.index, OutputCollector()).add(delta)
    return {index: collector.take() for index, collector in collectors.items()}


async def eventually(condition: Callable[[], bool], what: str, *, within: float = 20.0) -> None:
    """Wait until another thread or process makes the condition true."""
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {within} s"
        await asyncio.sleep(0.005)


async def eventually_async(
    condition: Callable[[], Awaitable[bool]], what: str, *, within: float = 20.0
) -> None:
    """Wait until an awaited condition is true."""
    end = time.monotonic() + within
    while not await condition():
        assert time.monotonic() < end, f"{what}: not within {within} s"
        await asyncio.sleep(0.05)


def all_idle(engine: AsyncEngine) -> bool:
    gauges = engine.gauges()
    return gauges.num_running == gauges.num_waiting == gauges.pages_held == 0
