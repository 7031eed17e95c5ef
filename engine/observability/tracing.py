"""OpenTelemetry traces: one span per request.

Events of a span are ``prefill`` (first computation of the prompt) and ``decode`` (first token). The
metadata ``traceparent`` sets the parent span. Spans contain no text and no token ids.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import octavo

from ..api.outputs import FinishReason
from ..api.stats import Observer, RequestRecord, StepRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

MAX_PARENTS = 4096  # limit of remembered parent spans
HEADERS = ("traceparent", "tracestate")


class Tracing:
    """Observer that exports spans of finished requests, then calls ``inner``."""

    def __init__(self, inner: Observer, exporter: SpanExporter, *, model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "octavo", "service.version": octavo.__version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo.engine", octavo.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._inner = inner
        self._model = model
        self._parents: OrderedDict[str, dict[str, str]] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, request_id: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Remember the parent span in a call's metadata."""
        headers = {key: value for key, value in metadata if key in HEADERS and isinstance(value, str)}
        if not headers:
            return
        with self._lock:
            self._parents[request_id] = headers
            if len(self._parents) > MAX_PARENTS:
                self._parents.popitem(last=False)

    def step(self, record: StepRecord) -> None:
        self._inner.step(record)
        for request in record.ended:
            self._span(request, time.time_ns())

    def rejected(self, reason: str) -> None:
        self._inner.rejected(reason)

    def close(self) -> None:
        """Send the remaining data and stop."""
        self._provider.shutdown()

    def _span(self, request: RequestRecord, end: int) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        with self._lock:
            headers = self._parents.pop(request.request_id, {})
        begin = end - _ns(request.total_s)
        span = self._tracer.start_span(
            "octavo.request",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            start_time=begin,
            attributes=self._attributes(request),
        )
        if request.ttft_s is not None:
            span.add_event("prefill", timestamp=begin + _ns(request.queue_s))
            span.add_event("decode", timestamp=begin + _ns(request.ttft_s))
        if request.finish_reason is FinishReason.ERROR:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def _attributes(self, request: RequestRecord) -> dict[str, Any]:
        return {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": request.request_id,
            "gen_ai.response.finish_reasons": (request.finish_reason.value,),
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            "gen_ai.usage.output_tokens": request.generated_tokens,
            "octavo.cached_tokens": request.cached_tokens,
            "octavo.queue_seconds": request.queue_s,
        }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
