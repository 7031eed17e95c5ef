"""Prometheus metrics, updated after each step and served on their own HTTP port.

Names, labels and buckets are a stable interface for dashboards. Units are base units.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, socket
from typing import Any, Generic, Protocol, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

import octavo

from ..api.address import Address, port_in_use
from ..api.engine_info import EngineInfo
from ..api.outputs import FinishReason
from ..api.stats import DraftRecord, Gauges, StepRecord
from .store_metrics import StoreCollector, TenantMetrics
from .vllm_mirror import render_vllm

AnswerT = TypeVar("AnswerT")


@dataclass
class SharedAnswer(Generic[AnswerT]):
    """Caches the result of ``make`` for concurrent callers. It is made at most once per ``interval_s``."""

    make: Callable[[], AnswerT]
    interval_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _made: tuple[float, AnswerT] | None = None

    def __call__(self) -> AnswerT:
        came = self.clock()
        with self._lock:
            if self._made is not None:
                began, answer = self._made
                if began > came:
                    return answer
                if (rest := began + self.interval_s - self.clock()) > 0:
                    self.sleep(rest)
            began = self.clock()
            answer = self.make()
            self._made = began, answer
            return answer


# Buckets in seconds. They start at 1 ms because small models answer that fast.
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
TTFT_BUCKETS = (*TOKEN_BUCKETS, 10.0, 30.0, 60.0, 120.0)
REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
MISS_REASONS = (
    "new", "evicted", "no_state", "other_format", "other_salt", "last_token", "partial_page", "disabled",
)  # fmt: skip
STEP_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


SCRAPE_INTERVAL_S = 0.1  # seconds; rendering takes milliseconds


class Metrics:
    """Observer with Prometheus metrics in its own registry."""

    def __init__(self, *, with_vllm_names: bool = False) -> None:
        self._with_vllm_names = with_vllm_names
        self._info: EngineInfo | None = None
        self._gauges = Gauges()
        self._scraped: SharedAnswer[tuple[str, bytes]] | None = None
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"octavo_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"octavo_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"octavo_{name}", text, labels, buckets=buckets, registry=registry)

        self._running = gauge("requests_running", "Running sequences.")
        self._waiting = gauge("requests_waiting", "Sequences waiting to be admitted.")
        self._media_waits = gauge(
            "requests_waiting_for_media", "Sequences that wait until an image of their prompt is encoded."
        )
        self._pages = gauge(
            "kv_pages", "Pages of the KV pool by state; all states together are the pool.", "state"
        )
        self._residual = gauge(
            "kv_residual_pages", "Pages of the residual window (16 bits) by state.", "state"
        )
        self._states = gauge(
            "state_slots",
            "State slots of recurrent layers by state (held, snapshot, empty).",
            "state",
        )
        self._holders = gauge(
            "holders",
            "Calls, streams, pages and other resources in use, by kind; each is 0 if the server is idle.",
            "kind",
        )
        self._usage = gauge("kv_usage_ratio", "Share of the KV pool's pages held by sequences.")
        self._queried = counter("prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.")
        self._misses = counter(
            "prefix_cache_miss_tokens", "Prompt tokens not found in the prefix cache, by reason.", "reason"
        )
        self._evicted = counter("evicted_pages", "Cached pages evicted and reused for other tokens.")
        self._preemptions = counter(
            "preemptions", "Running sequences that were preempted because the page pool was full."
        )
        self._prompt = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._generated = counter("generated_tokens", "Tokens generated.")
        self._requests = counter("requests", "Ended requests.", "finish_reason")
        self._rejected = counter("rejected_requests", "Requests refused on arrival, by reason.", "reason")
        self._drafts = counter("drafts", "Drafts verified; one draft may have several tokens.")
        self._draft_tokens = counter("spec_drafted_tokens", "Draft tokens computed.")
        self._accepted = counter("spec_accepted_tokens", "Draft tokens accepted.")
        self._accepted_at = counter(
            "spec_accepted_tokens_per_position",
            "Draft tokens accepted, by position in the draft (the first position is 0).",
            "position",
        )
        self._step_seconds = histogram("step_seconds", "Duration of an engine step.", TOKEN_BUCKETS)
        self._step_predicted = histogram(
            "step_predicted_seconds",
            "Predicted duration of a step, if the scheduler has a latency target.",
            TOKEN_BUCKETS,
        )
        self._step_tokens = histogram(
            "step_tokens",
            "Tokens per engine step, by kind; steps without tokens of the kind are not counted.",
            STEP_TOKEN_BUCKETS,
            "kind",
        )
        self._ttft = histogram(
            "time_to_first_token_seconds", "Time from submission to the first token.", TTFT_BUCKETS
        )
        self._inter_token = histogram(
            "inter_token_seconds", "Time between two tokens of one sequence.", TOKEN_BUCKETS
        )
        self._queue = histogram(
            "queue_seconds", "Time from submission to the first step of a request.", TTFT_BUCKETS
        )
        self._encoding = histogram(
            "image_encoding_seconds",
            "Time to encode an image, without the engine steps in between.",
            TTFT_BUCKETS,
        )
        self._image_hits = counter("image_cache_hits", "Images found in the cache of encoded images.")
        self._request_seconds = histogram(
            "request_seconds", "Time from submission to the end of a request.", REQUEST_BUCKETS
        )
        self._build_info = Info("octavo_build", "The software's version.", registry=registry)
        self._build_info.info({"version": octavo.__version__})
        self._cache_info = Info(
            "octavo_cache_config", "Settings of the KV cache, as labels.", registry=registry
        )
        self._tenants = TenantMetrics(registry)
        self._store = StoreCollector()
        registry.register(self._store)
        ProcessCollector(registry=registry)
        # Known label values start at 0, so that rates have no gaps.
        for metric, values in (
            (self._requests, FinishReason),
            (self._misses, MISS_REASONS),
            (self._rejected, ("invalid", "too_long", "overloaded", "queue_timeout")),
            (self._step_tokens, ("prefill", "decode")),
        ):
            for value in values:
                metric.labels(value)

    def describe(self, info: EngineInfo) -> None:
        self._info = info
        versions = {"version": octavo.__version__, "backend": info.backend, "model": info.name}
        self._build_info.info(versions)
        self._cache_info.info(
            {
                "kv_format": info.kv_format,
                "residual_pages": str(info.residual_pages),
                "page_size": str(info.page_size),
                "num_pages": str(info.num_pages),
                "pages_bytes": str(info.memory.pages),
            }
        )

    def step(self, record: StepRecord) -> None:
        self.set_gauges(record.gauges)
        self._queried.inc(record.query_tokens)
        self._hits.inc(record.hit_tokens)
        for reason, tokens in record.miss_tokens.items():
            self._misses.labels(reason).inc(tokens)
        self._evicted.inc(record.evicted_pages)
        self._preemptions.inc(record.preemptions)
        self._image_hits.inc(record.image_hits)
        self._generated.inc(record.generated_tokens)
        self._count_drafts(record.drafts)
        self._tenants.count(record.tenant_tokens)
        self._step_seconds.observe(record.seconds)
        if record.predicted_s is not None:
            self._step_predicted.observe(record.predicted_s)
        for kind, tokens in (("prefill", record.prefill_tokens), ("decode", record.decode_tokens)):
            if tokens:
                self._step_tokens.labels(kind).observe(tokens)
        for histogram, values in (
            (self._ttft, record.ttft_s),
            (self._inter_token, record.inter_token_s),
            (self._queue, record.queue_s),
            (self._encoding, record.encoded_s),
        ):
            for value in values:
                histogram.observe(value)
        for request in record.ended:
            # Errors in clients' parameters must not raise the operator's alert.
            self._requests.labels("invalid" if request.invalid else request.finish_reason.value).inc()
            self._prompt.inc(request.prompt_tokens)
            self._request_seconds.observe(request.total_s)

    def _count_drafts(self, drafts: tuple[DraftRecord, ...]) -> None:
        for num_drafts, num_accepted in drafts:
            self._drafts.inc()
            self._draft_tokens.inc(num_drafts)
            self._accepted.inc(num_accepted)
            for position in range(num_accepted):
                self._accepted_at.labels(str(position)).inc()

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def set_gauges(self, gauges: Gauges) -> None:
        self._gauges = gauges
        self._running.set(gauges.num_running)
        self._waiting.set(gauges.num_waiting)
        self._media_waits.set(gauges.media_waits)
        pages = {
            "held": gauges.pages_held,
            "idle_cached": gauges.pages_idle_cached,
            "idle_empty": gauges.pages_idle_empty,
        }
        for state, count in pages.items():
            self._pages.labels(state).set(count)
            if gauges.residual is not None:
                self._residual.labels(state).set(getattr(gauges.residual, state))
            if gauges.states is not None:
                self._states.labels(state).set(getattr(gauges.states, state))
        self._store.counts, self._store.swaps = gauges.store, gauges.swap
        self._tenants.set_loads(gauges.tenants)
        self._usage.set(gauges.pages_held / (sum(pages.values()) or 1))

    def set_holders(self, counts: Mapping[str, int]) -> None:
        for kind, count in counts.items():
            self._holders.labels(kind).set(count)

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        text: bytes = generate_latest(self.registry)
        if self._with_vllm_names and self._info is not None:
            text += render_vllm(self.registry, self._info, self._gauges.adapters)
        return text

    def scrape(self, probes: Probes) -> tuple[str, bytes]:
        """Return content type and text of all metrics."""
        if self._scraped is None:
            self._scraped = SharedAnswer(lambda: self._scrape(probes), SCRAPE_INTERVAL_S)
        return self._scraped()

    def _scrape(self, probes: Probes) -> tuple[str, bytes]:
        self.set_holders(probes.holders())
        self.set_gauges(probes.gauges())
        return CONTENT_TYPE_LATEST, self.render()


class Probes(Protocol):
    def gauges(self) -> Gauges: ...

    def holders(self) -> Mapping[str, int]: ...

    def alive(self) -> str | None:
        """Return why the process should be restarted; None if it is healthy."""
        ...

    def ready(self) -> str | None:
        """Return why the server refuses requests now; None if it accepts them."""
        ...


class MetricsServer:
    """Serves ``/metrics``, ``/healthz`` and ``/readyz`` on its own threads."""

    def __init__(
        self,
        address: Address,
        metrics: Metrics,
        probes: Probes,
        *,
        tls: ssl.SSLContext | None = None,
        may_read: Callable[[str], bool] | None = None,
    ) -> None:
        """Start to listen. Raises InvalidConfig if that fails."""
        try:
            self._server = _HTTPServer(address, _routes(metrics, probes), tls, may_read)
        except OSError as error:
            raise port_in_use(address, "--metrics") from error
        self.address = address.with_port(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="octavo-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


METRICS_PATH = "/metrics"
Route = Callable[[], tuple[int, str, bytes]]


def _routes(metrics: Metrics, probes: Probes) -> dict[str, Route]:
    def scrape() -> tuple[int, str, bytes]:
        return 200, *metrics.scrape(probes)

    def probe(check: Callable[[], str | None]) -> Route:
        def answer() -> tuple[int, str, bytes]:
            reason = check()
            body = {"status": "ok"} if reason is None else {"status": "unavailable", "reason": reason}
            return 200 if reason is None else 503, "application/json", json.dumps(body).encode() + b"\n"

        return answer

    return {METRICS_PATH: scrape, "/healthz": probe(probes.alive), "/readyz": probe(probes.ready)}


def _refuse() -> tuple[int, str, bytes]:
    return 401, "text/plain", b"no valid token; send Authorization: Bearer TOKEN\n"


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        address: Address,
        routes: dict[str, Route],
        tls: ssl.SSLContext | None,
        may_read: Callable[[str], bool] | None,
    ) -> None:
        self.routes = routes
        self.may_read = may_read
        self._tls = tls
        self.address_family = AF_INET6 if ":" in address.host else AF_INET
        super().__init__((address.host, address.port), _Handler)

    def get_request(self) -> tuple[socket, Any]:
        connection, peer = super().get_request()
        if self._tls is not None:
            connection = self._tls.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
            )
        return connection, peer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connection errors."""


class _Handler(BaseHTTPRequestHandler):
    server: _HTTPServer
    timeout = 10  # seconds for a client to send its request

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        route = self.server.routes.get(path)
        may_read = self.server.may_read
        if path == METRICS_PATH and may_read and not may_read(self.headers.get("Authorization", "")):
            route = _refuse
        status, content_type, body = route() if route else (404, "text/plain", b"not found\n")
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            if status == 401:
                self.send_header("WWW-Authenticate", "Bearer")
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...
