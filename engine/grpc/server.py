from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from octavo.proto import (
    cache_pb2,
    cache_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)

from ..api.address import Address, port_in_use
from ..api.stats import Gauges
from ..memory.malloc import give_memory_back
from .call_limiter import CallLimiter
from .octavo_v1.cache import CacheServicer
from .octavo_v1.generation import GenerationServicer
from .request_handler import WRITE_TIMEOUT_S, Metadata, RequestHandler
from .security import Security
from .vllm.service import SERVICE_NAME as VLLM_SERVICE
from .vllm.service import VllmEngineServicer

if TYPE_CHECKING:
    from ..frontend.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20  # bytes: limit of an outgoing message
MESSAGE_BYTES_PER_TOKEN = 8  # bytes per prompt token of an incoming message
MESSAGE_BYTES_APART = 2**20
IMAGE_BYTES = 32 * 2**20  # additional bytes of a message if the model takes images
MAX_OTHER_CALLS = 1024  # concurrent calls, in addition to the maximum number of requests
MAX_CONNECTION_CALLS = 2048  # concurrent calls of a connection
MAX_PENDING_CALLS = 5 * MAX_CONNECTION_CALLS
MAX_PING_STRIKES = 100
DEATH_POLL_S = 0.1
BURST_POLL_S = 2.0
HEALTH_GRACE_S = 1.0  # seconds to notify health watchers
CLOSE_GRACE_S = 2.0  # seconds to send the last responses

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Clients may ping every 10 s, even without calls.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Ping clients, to release the pages of clients that vanished.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Idle clients are disconnected after this time.
    ("grpc.max_connection_idle_ms", 600_000),
    # Without this, a second server could share the port unnoticed.
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", MAX_CONNECTION_CALLS),
    # Above this limit (default 1,000), gRPC cancels random calls, even of other clients.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
)


def message_bytes(max_model_len: int) -> int:
    """Return the size limit of incoming messages, in bytes, for a model's length."""
    return MESSAGE_BYTES_PER_TOKEN * max_model_len + MESSAGE_BYTES_APART


class GrpcServer:
    """Serves a started engine through octavo.v1 and vLLM's service. It can be started once."""

    def __init__(
        self,
        engine: AsyncEngine,
        security: Security | None = None,
        *,
        with_reflection: bool = True,
        max_message_bytes: int | None = None,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        begin: Callable[[str, Metadata], None] | None = None,
    ) -> None:
        self.security = security or Security()
        self.handler = RequestHandler(engine, self.security, begin, write_timeout_s=write_timeout_s)
        self.servicer = GenerationServicer(self.handler)
        self._engine = engine
        config = engine.config
        self.limiter = CallLimiter(
            config.max_running + config.max_waiting + MAX_OTHER_CALLS,
            tenant_of=self.handler.tenant,
            patience_s=write_timeout_s,
        )
        if max_message_bytes is None:
            max_message_bytes = message_bytes(engine.info.max_model_len)
        self.max_message_bytes = max_message_bytes
        self._server = self._new_server()
        self._of_adapters: list[grpc.aio.Server] = []
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._watches: list[asyncio.Task[None]] = []
        self.died = asyncio.Event()
        generation_pb2_grpc.add_GenerationServicer_to_server(  # type: ignore[no-untyped-call]
            self.servicer, self._server
        )
        cache_pb2_grpc.add_CacheServicer_to_server(  # type: ignore[no-untyped-call]
            CacheServicer(self.handler), self._server
        )
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(self.handler), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        own = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
        cache = cache_pb2.DESCRIPTOR.services_by_name["Cache"].full_name
        self.services: tuple[str, ...] = (own, cache, VLLM_SERVICE, health.SERVICE_NAME)
        if with_reflection:
            self.services += (reflection.SERVICE_NAME,)
            reflection.enable_server_reflection(self.services, self._server)

    def _new_server(self) -> grpc.aio.Server:
        room = 0 if self._engine.info.images is None else IMAGE_BYTES
        return grpc.aio.server(
            interceptors=[self.limiter.interceptor()],
            options=[*OPTIONS, ("grpc.max_receive_message_length", self.max_message_bytes + room)],
        )

    def held(self) -> dict[str, int]:
        """Return how many calls, streams, pages and other resources are in use, by kind."""
        engine, handler, limiter = self._engine, self.handler, self.limiter
        gauges = Gauges() if engine.dead_error is not None else engine.gauges()
        counted = (limiter.calls, limiter.health_calls, handler.page_events.holders)
        return {
            **{holders.name: holders.total for holders in counted},
            "requests": handler.num_active,
            "streams": engine.num_streams,
            "text_calls": handler.texts.pending.total,
            "sequences": gauges.num_running + gauges.num_waiting,
            "pages": gauges.pages_held - gauges.pages_pinned,
            "pinned_pages": gauges.pages_pinned,
            "residual_pages": 0 if gauges.residual is None else gauges.residual.held,
            "state_slots": 0 if gauges.states is None else gauges.states.held,
        }

    async def start(self, address: Address) -> Address:
        """Start to listen; return the actual address. Raises InvalidConfig if that fails."""
        port = self._bind(self._server, address, "--listen")
        for name in ("", *self.services):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        self._watches = [asyncio.create_task(self._watch_engine()), asyncio.create_task(self._watch_bursts())]
        return address.with_port(port)

    async def start_adapter(self, adapter: str, address: Address) -> Address:
        """Serve a LoRA adapter as a model on its own address. Raises InvalidConfig if listening fails."""
        server = self._new_server()
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(
            VllmEngineServicer(self.handler, adapter=adapter), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        port = self._bind(server, address, "--lora-listen")
        await server.start()
        self._of_adapters.append(server)
        return address.with_port(port)

    def _bind(self, server: grpc.aio.Server, address: Address, flag: str) -> int:
        credentials = self.security.credentials()
        self.security.warn_of_strangers(address)
        try:
            if credentials is None:
                port = server.add_insecure_port(str(address))
            else:
                port = server.add_secure_port(str(address), credentials)
        except RuntimeError as error:
            raise port_in_use(address, flag) from error
        if port == 0:
            raise port_in_use(address, flag)
        return port

    async def stop(self, drain_timeout: float = 0.0) -> None:
        """Refuse new requests, wait for running requests, then close."""
        self.handler.draining = True
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        with contextlib.suppress(TimeoutError):  # a client may not read
            await asyncio.wait_for(self._health.enter_graceful_shutdown(), HEALTH_GRACE_S)
        if self.handler.num_active:
            logger.info("draining %d requests for at most %g s", self.handler.num_active, drain_timeout)
        await self._engine.stop(drain_timeout=drain_timeout)
        await asyncio.gather(*(each.stop(CLOSE_GRACE_S) for each in (self._server, *self._of_adapters)))
        self.handler.close()
        self.limiter.close()

    async def _watch_engine(self) -> None:
        while self._engine.dead_error is None:
            await asyncio.sleep(DEATH_POLL_S)
        logger.critical("the engine has died: %s", self._engine.dead_error)
        for name in ("", *self.services):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        self.died.set()

    async def _watch_bursts(self) -> None:
        while True:
            await asyncio.sleep(BURST_POLL_S)
            if self.limiter.burst_is_over():
                await asyncio.to_thread(give_memory_back)
