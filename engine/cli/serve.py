"""``octavo serve``: run an engine with gRPC, HTTP and metrics until a signal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import importlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..api.address import Address, bound_socket, check_free
from ..api.config import EngineConfig
from ..api.engine_info import EngineInfo
from ..api.errors import InvalidConfig, OctavoError
from ..api.stats import Gauges
from ..arguments.options import budget_lines, engine_config, set_up_logging
from ..executor.parallel import follow_leader, is_follower
from ..frontend.text_executor import call_on_daemon
from .serve_limits import ExitDeadline, raise_descriptor_limit
from .serve_options import ServeOptions, add_arguments, serve_options

if TYPE_CHECKING:
    from ..frontend.async_engine import AsyncEngine
    from ..grpc.security import Security
    from ..grpc.server import GrpcServer
    from ..grpc.tenant_salts import TenantSalts
    from ..observability.genai_metrics import GenAiMetrics
    from ..observability.prometheus import Metrics
    from ..observability.tracing import Tracing


__all__ = ["add_arguments", "run", "serve", "settle_interpreter"]

logger = logging.getLogger(__name__)
DEATH_LINGER_S = 10.0
GRACE_S = 5.0
LOADING_GRACE_S = 2.0
EXPORT_GRACE_S = 2.0
HANG_S = 120.0  # seconds; a longer step counts as hanging
SWITCH_INTERVAL_S = 0.0005


def run(args: argparse.Namespace) -> int:
    set_up_logging(args)
    raise_descriptor_limit()
    config = engine_config(args, target_itl="auto")
    if is_follower(config):
        follow_leader()
    deadline = ExitDeadline()
    deadline.code = asyncio.run(serve(config, serve_options(args), deadline))
    return deadline.code


async def serve(config: EngineConfig, options: ServeOptions, deadline: ExitDeadline) -> int:
    """Serve until SIGTERM or SIGINT (returns 0), or until the engine fails (returns 1)."""
    stopping = _signal_event(lambda: deadline.start(options.drain_timeout + GRACE_S, 1))
    from ..frontend.async_engine import AsyncEngine
    from ..grpc.security import ReloadableTls, Security, Tokens
    from ..observability.prometheus import Metrics, MetricsServer

    check_free(options.listen, "--listen")
    if options.http is not None:
        check_free(options.http, "--http")
    for address in options.lora_listen.values():
        check_free(address, "--lora-listen")
    salts = None
    if options.auth_token_file is not None or options.api_key is not None:
        salts = _tenant_salts(config)
    security = Security(
        tls=options.tls, token_file=options.auth_token_file, api_key=options.api_key, salts=salts
    )
    reloads: dict[str, Callable[[], None]] = {}
    scrape_tls, scrape_tokens = None, None
    if options.metrics_tls is not None:
        scrape_tls = ReloadableTls(options.metrics_tls)
        reloads["metrics port, certificate"] = scrape_tls.reload
    if options.metrics_token_file is not None:
        scrape_tokens = Tokens(options.metrics_token_file, flag="--metrics-token-file")
        reloads["metrics port, tokens"] = scrape_tokens.reload
    _reload_on_hangup(security, options.listen, reloads)
    metrics = Metrics(with_vllm_names=options.vllm_metrics)
    exported, tracing = _exporters(options, metrics, config)
    observer = tracing or exported or metrics
    engine = AsyncEngine(config, observer=observer, own_process=options.engine_process)
    probes = ServerProbes(engine)
    async with contextlib.AsyncExitStack() as stack:
        scrapes = None
        if options.metrics is not None:
            scrapes = MetricsServer(
                options.metrics,
                metrics,
                probes,
                tls=None if scrape_tls is None else scrape_tls.context,
                may_read=None if scrape_tokens is None else scrape_tokens.accepts,
            )
            stack.callback(scrapes.close)
        for exporter in (tracing, exported):
            if exporter is not None:
                stack.push_async_callback(_close_exporter, exporter)
        publisher = None
        if options.kv_events is not None:
            from ..kv_events.zmq_publisher import KvEventPublisher

            publisher = KvEventPublisher(options.kv_events)
            stack.push_async_callback(publisher.close)
        stack.push_async_callback(engine.stop)
        if not await _load(engine, stopping, deadline):
            return 0
        from ..grpc.server import GrpcServer

        settle_interpreter()
        metrics.describe(engine.info)
        server = GrpcServer(
            engine,
            security,
            with_reflection=options.reflection,
            max_message_bytes=options.max_message_size,
            write_timeout_s=options.write_timeout,
            begin=tracing.begin if tracing is not None else None,
        )
        if publisher is not None:
            if security.tokens is not None:
                logger.warning("--kv-events-endpoint shows token ids of all tenants' prompts to every reader")
            publisher.start(engine, server.handler.page_events)
        grpc_address = await server.start(options.listen)
        of_adapters = {n: await server.start_adapter(n, at) for n, at in options.lora_listen.items()}
        probes.server = server
        http_socket, http_address = None, None
        if options.http is not None:
            server.security.warn_of_strangers(options.http)
            http_socket = stack.enter_context(bound_socket(options.http, "--http"))
            http_socket.listen()
            http_address = options.http.with_port(http_socket.getsockname()[1])
        metrics_address = scrapes.address if scrapes else None
        _announce(engine.info, grpc_address, metrics_address, http_address, of_adapters)
        if http_socket is not None:
            await _serve_http(server, http_socket, options, metrics, probes, reloads, stack)
        return await _serve_until_end(server, stopping, options.drain_timeout)


async def _serve_http(
    server: GrpcServer,
    http_socket: socket.socket,
    options: ServeOptions,
    metrics: Metrics,
    probes: ServerProbes,
    reloads: dict[str, Callable[[], None]],
    stack: contextlib.AsyncExitStack,
) -> None:
    await asyncio.to_thread(importlib.import_module, "octavo.engine.http.server")
    from ..http.server import HttpServer

    http = HttpServer(
        server.handler,
        calls=server.limiter.calls,
        max_body_bytes=server.max_message_bytes,
        check=probes.ready,
        render=functools.partial(metrics.scrape, probes),
        write_timeout_s=options.write_timeout,
        allowed_origins=options.allowed_origins,
    )
    await http.start(http_socket, options.tls)
    stack.push_async_callback(http.stop)
    reloads["HTTP"] = http.reload
    settle_interpreter()


def _exporters(
    options: ServeOptions, metrics: Metrics, config: EngineConfig
) -> tuple[GenAiMetrics | None, Tracing | None]:
    """Return the exporters of OpenTelemetry. Each passes its records on, the last one to ``metrics``."""
    from ..observability.genai_metrics import GenAiMetrics, otlp_reader
    from ..observability.otlp import endpoint_of, otlp_exporter
    from ..observability.tracing import Tracing

    exported, tracing = None, None
    measures, traces = options.otlp_metrics_endpoint, options.otlp_traces_endpoint
    if (at := endpoint_of("metrics") if measures is None else measures) is not None:
        exported = GenAiMetrics(metrics, otlp_reader(at), model=_first_name(config))
    if (at := endpoint_of("traces") if traces is None else traces) is not None:
        exporter = otlp_exporter("traces", at)
        tracing = Tracing(exported or metrics, exporter, model=_first_name(config))
    return exported, tracing


def _first_name(config: EngineConfig) -> str:
    from ..memory.model_files import served_name

    return (config.served_model_name or (served_name(config.model),))[0]


def settle_interpreter() -> None:
    # Exclude objects of the start-up from garbage collection, which saves tens of milliseconds.
    gc.collect()
    gc.freeze()
    # Python's default of 5 ms would make the engine's thread wait for the event loop.
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _tenant_salts(config: EngineConfig) -> TenantSalts:
    from ..grpc.tenant_salts import TenantSalts, load_tenant_salts

    if config.remote_cache is None:
        return load_tenant_salts(config.cache_dir or config.save_dir)
    from ..kv_store.remote import shared_tenant_key

    key = shared_tenant_key(config.remote_cache)
    return load_tenant_salts(config.save_dir) if key is None else TenantSalts(key)


def _reload_on_hangup(security: Security, listen: Address, more: Mapping[str, Callable[[], None]]) -> None:
    loop = asyncio.get_running_loop()
    if security.tls is None and security.tokens is None and not more:
        loop.add_signal_handler(
            signal.SIGHUP, logger.info, "SIGHUP: the server has no token or certificate files to reload"
        )
        return

    def reload() -> None:
        security.reload()
        for port, each in more.items():
            try:
                each()
            except InvalidConfig as error:
                logger.error("%s: reloading failed, so the old files stay in use: %s", port, error)

    loop.add_signal_handler(signal.SIGHUP, reload)
    if security.tls is None and security.tokens is not None and not listen.is_local:
        logger.warning("tokens for %s are sent unencrypted; use --tls-cert and --tls-key", listen)


async def _close_exporter(exporter: Tracing | GenAiMetrics) -> None:
    try:
        await asyncio.wait_for(call_on_daemon(exporter.close, name="octavo-exporter"), EXPORT_GRACE_S)
    except TimeoutError:
        logger.warning(
            "the OpenTelemetry collector did not respond within %g s; data that was not sent is dropped",
            EXPORT_GRACE_S,
        )


async def _load(engine: AsyncEngine, stopping: asyncio.Event, deadline: ExitDeadline) -> bool:
    start = asyncio.create_task(engine.start())
    stop = asyncio.create_task(stopping.wait())
    await asyncio.sleep(0)
    importlib.import_module("octavo.engine.grpc.server")
    await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if start.done():
        start.result()
        return True
    deadline.start(LOADING_GRACE_S, 0)
    start.cancel()
    await asyncio.wait((start,))
    return False


async def _serve_until_end(server: GrpcServer, stopping: asyncio.Event, drain_timeout: float) -> int:
    waits = [asyncio.create_task(event.wait()) for event in (stopping, server.died)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    died = server.died.is_set()
    if died:
        await asyncio.wait(waits[:1], timeout=DEATH_LINGER_S)
    for wait in waits:
        wait.cancel()
    logger.info("shutting down")
    await server.stop(0.0 if died else drain_timeout)
    return 1 if died or not stopping.is_set() else 0


def _announce(
    info: EngineInfo,
    grpc_address: Address,
    metrics_address: Address | None,
    http_address: Address | None,
    of_adapters: Mapping[str, Address],
) -> None:
    for line in budget_lines(info):
        print(line)
    http = "" if http_address is None else f"http={http_address} "
    ports = ",".join(f"{name}={address}" for name, address in of_adapters.items())
    adapters = f"adapters={ports} " if ports else ""
    print(
        f"octavo ready: grpc={grpc_address} {http}{adapters}metrics={metrics_address or 'off'} "
        f"model={info.name} backend={info.backend} kv={info.kv_format} pages={info.num_pages}",
        flush=True,
    )


def _signal_event(heard: Callable[[], None]) -> asyncio.Event:
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    ends = (signal.SIGTERM, signal.SIGINT)

    def stop() -> None:
        heard()
        event.set()
        for end in ends:
            loop.remove_signal_handler(end)

    for end in ends:
        loop.add_signal_handler(end, stop)
    return event


class ServerProbes:
    def __init__(self, engine: AsyncEngine) -> None:
        self.server: GrpcServer | None = None
        self._engine = engine

    def gauges(self) -> Gauges:
        try:
            return self._engine.gauges()
        except OctavoError:
            return Gauges()

    def holders(self) -> dict[str, int]:
        return {} if self.server is None else self.server.held()

    def alive(self) -> str | None:
        if (dead_error := self._engine.dead_error) is not None:
            return f"the engine has died: {dead_error}"
        if (seconds := self._engine.step_seconds()) > HANG_S:
            return f"the engine hangs: the current step has taken {seconds:.0f} s so far"
        return None

    def ready(self) -> str | None:
        if (reason := self.alive()) is not None:
            return reason
        if self.server is None:
            return "the model is being loaded"
        return "the server is draining" if self.server.handler.draining else None
