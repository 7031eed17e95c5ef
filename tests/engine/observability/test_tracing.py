from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs the extra `tracing`")

from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from octavo.engine.api.errors import InvalidConfig
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import Gauges, RequestRecord, StepRecord
from octavo.engine.cli import main
from octavo.engine.client.client import Client
from octavo.engine.client.server_process import ServerProcess
from octavo.engine.observability.genai_metrics import BUCKETS, GenAiMetrics, otlp_reader
from octavo.engine.observability.otlp import endpoint_of, otlp_exporter
from octavo.engine.observability.prometheus import Metrics
from octavo.engine.observability.tracing import Tracing
from octavo.proto import generation_pb2

pytestmark = pytest.mark.server

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = ("traceparent", f"00-{TRACE}-{SPAN}-01")
RECORD = RequestRecord(
    request_id="r", finish_reason=FinishReason.LENGTH, prompt_tokens=40, cached_tokens=32,
    generated_tokens=9, queue_s=0.5, ttft_s=0.75, total_s=2.0,
)  # fmt: skip


def step_of(*ended: RequestRecord) -> StepRecord:
    return StepRecord(
        seconds=0.1, prefill_tokens=1, decode_tokens=0, generated_tokens=0, preemptions=0, evicted_pages=0,
        query_tokens=0, hit_tokens=0, gauges=Gauges(num_running=7), ended=ended,
    )  # fmt: skip


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter, metrics: Metrics) -> Iterator[Tracing]:
    tracing = Tracing(metrics, exporter, model="demo")
    yield tracing
    tracing.close()


def spans_of(tracing: Tracing, exporter: InMemorySpanExporter) -> tuple[ReadableSpan, ...]:
    tracing.close()
    return exporter.get_finished_spans()


def test_a_span_has_the_times_of_its_request(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    tracing.step(step_of(RECORD))
    (span,) = spans_of(tracing, exporter)
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == 2_000_000_000
    events = [(event.name, event.timestamp - span.start_time) for event in span.events]
    assert events == [("prefill", 500_000_000), ("decode", 750_000_000)]
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "demo",
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 9,
        "octavo.cached_tokens": 32,
        "octavo.queue_seconds": 0.5,
    }
    assert span.parent is None
    assert span.status.is_ok or span.status.is_unset


def test_a_request_that_never_ran_has_no_events(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    failed = dataclasses.replace(RECORD, ttft_s=None, finish_reason=FinishReason.ERROR)
    tracing.step(step_of(failed))
    (span,) = spans_of(tracing, exporter)
    assert not span.events
    assert not span.status.is_ok
    assert not span.status.is_unset


def test_the_callers_span_is_the_parent_of_its_own_request_alone(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    tracing.begin("r", [PARENT, ("other", "x")])
    tracing.begin("s", [("other", "x")])
    tracing.step(step_of(RECORD, dataclasses.replace(RECORD, request_id="s")))
    tracing.step(step_of(RECORD))
    first, second, third = spans_of(tracing, exporter)
    assert first.parent is not None
    assert (f"{first.parent.trace_id:032x}", f"{first.parent.span_id:016x}") == (TRACE, SPAN)
    assert second.parent is None
    assert third.parent is None


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "", "ftp://x"])
def test_an_endpoint_without_a_scheme_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidConfig, match="http://"):
        otlp_exporter("traces", endpoint)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: asyncio.Queue[Any] = asyncio.Queue()

    async def Export(self, request: Any, _context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.put_nowait(span)
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def listening(collector: Collector, metrics: MetricsCollector | None = None) -> AsyncIterator[str]:
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        collector, server
    )
    if metrics is not None:
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(  # type: ignore[no-untyped-call]
            metrics, server
        )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)


def measured(*ended: RequestRecord) -> dict[str, list[tuple[dict[str, Any], float, int]]]:
    reader, inner = InMemoryMetricReader(), Metrics()
    metrics = GenAiMetrics(inner, reader, model="demo")
    metrics.step(step_of(*ended))
    metrics.rejected("invalid")
    assert "octavo_requests_running 7.0" in inner.render().decode()
    data = reader.get_metrics_data()
    assert data is not None
    (scope,) = data.resource_metrics[0].scope_metrics
    found = {}
    for metric in scope.metrics:
        assert metric.unit == "s"
        points: Any = metric.data.data_points
        assert {tuple(point.explicit_bounds) for point in points} == {BUCKETS[metric.name]}
        found[metric.name] = [(dict(point.attributes), point.sum, point.count) for point in points]
    metrics.close()
    return found


COMMON = {
    "gen_ai.operation.name": "text_completion",
    "gen_ai.provider.name": "octavo",
    "gen_ai.request.model": "demo",
    "gen_ai.response.model": "demo",
}


def test_metrics_have_the_names_of_the_semantic_conventions() -> None:
    one_token = dataclasses.replace(RECORD, generated_tokens=1, total_s=0.75)
    conventions = pytest.importorskip("opentelemetry.semconv._incubating.metrics.gen_ai_metrics")
    assert measured(RECORD, one_token) == {
        conventions.GEN_AI_SERVER_REQUEST_DURATION: [(COMMON, 2.75, 2)],
        conventions.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN: [(COMMON, 1.5, 2)],
        conventions.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN: [(COMMON, 1.25 / 8, 1)],
    }


def test_a_failed_request_has_a_duration_and_its_error() -> None:
    failed = dataclasses.replace(RECORD, finish_reason=FinishReason.ERROR)
    found = measured(failed, dataclasses.replace(failed, invalid=True))
    assert found == {
        "gen_ai.server.request.duration": [
            (COMMON | {"error.type": "_OTHER"}, 2.0, 1), (COMMON | {"error.type": "invalid_request"}, 2.0, 1)
        ]
    }  # fmt: skip


def test_the_environment_configures_otlp_endpoints() -> None:
    both = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}
    own = both | {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://b:4317"}
    assert [endpoint_of(name, {}) for name in ("traces", "metrics")] == [None, None]
    assert [endpoint_of(name, both) for name in ("traces", "metrics")] == ["http://a:4317"] * 2
    assert [endpoint_of(name, own) for name in ("traces", "metrics")] == ["http://a:4317", "http://b:4317"]
    assert endpoint_of("metrics", both | {"OTEL_METRICS_EXPORTER": "none"}) is None
    assert endpoint_of("traces", both | {"OTEL_METRICS_EXPORTER": "none"}) is not None
    assert endpoint_of("metrics", both | {"OTEL_SDK_DISABLED": "true"}) is None
    with pytest.raises(InvalidConfig, match=r"OTEL_METRICS_EXPORTER=prometheus .*use otlp"):
        endpoint_of("metrics", both | {"OTEL_METRICS_EXPORTER": "prometheus"})
    with pytest.raises(InvalidConfig, match="http/protobuf is not supported; use grpc"):
        endpoint_of("metrics", both | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
    with pytest.raises(InvalidConfig, match="got 'a:4317'"):
        otlp_reader("a:4317")


@pytest.mark.parametrize(
    ("flag", "module"),
    [
        ("--otlp-metrics-endpoint", "opentelemetry.sdk.metrics"),
        ("--otlp-traces-endpoint", "opentelemetry.sdk.trace"),
    ],
)
def test_without_the_extra_there_is_one_line_with_the_remedy(
    flag: str, module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    assert main(["serve", "--listen", "127.0.0.1:0", "--metrics", "off", flag, "http://127.0.0.1:4317"]) == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1, err
    assert "pip install '.[tracing]'" in err


class MetricsCollector(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self) -> None:
        self.names: asyncio.Queue[str] = asyncio.Queue()

    async def Export(self, request: Any, _context: Any) -> Any:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    self.names.put_nowait(metric.name)
        return metrics_service_pb2.ExportMetricsServiceResponse()


async def test_spans_go_to_the_option_and_metrics_to_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans, metrics = Collector(), MetricsCollector()
    async with listening(spans, metrics) as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", endpoint)
        options = ["--num-pages", "32", "--otlp-traces-endpoint", endpoint]
        async with ServerProcess(options) as server, Client(server.ready["grpc"]) as client:
            async for _ in client.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True)):
                pass
            few = generation_pb2.SamplingParams(max_tokens=3)
            message = generation_pb2.GenerateRequest(text="Hello", request_id="mine", sampling=few)
            async for _ in client.stub.Generate(message, metadata=[PARENT]):
                pass
        ended = [spans.spans.get_nowait() for _ in range(spans.spans.qsize())]
        names = {metrics.names.get_nowait() for _ in range(metrics.names.qsize())}
    alone, child = sorted(ended, key=lambda span: bool(span.parent_span_id))
    assert (child.trace_id.hex(), child.parent_span_id.hex()) == (TRACE, SPAN)
    assert [event.name for event in alone.events] == ["prefill", "decode"]
    tokens = {item.key: item.value.int_value for item in alone.attributes}
    assert (tokens["gen_ai.usage.input_tokens"], tokens["gen_ai.usage.output_tokens"]) == (3, 3)
    assert names == set(BUCKETS)
    assert server.returncode == 0
