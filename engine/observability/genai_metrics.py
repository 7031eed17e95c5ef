from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import octavo

from ..api.outputs import FinishReason
from ..api.stats import Observer, RequestRecord, StepRecord
from .otlp import otlp_exporter

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader

DURATION = "gen_ai.server.request.duration"
FIRST_TOKEN = "gen_ai.server.time_to_first_token"
OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"
BUCKETS: Mapping[str, tuple[float, ...]] = {
    DURATION: (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    FIRST_TOKEN: (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    ),
    OUTPUT_TOKEN: (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
}  # fmt: skip
DESCRIPTIONS = {
    DURATION: "Generative AI server request duration such as time-to-last byte or last output token.",
    FIRST_TOKEN: "Time to generate first token for successful responses.",
    OUTPUT_TOKEN: "Time per output token generated after the first token for successful responses.",
}
OPERATION, PROVIDER = "text_completion", "octavo"


class GenAiMetrics:
    """Observer that records metrics of finished requests, then calls ``inner``."""

    def __init__(self, inner: Observer, reader: MetricReader, *, model: str) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource

        resource = Resource.create({"service.name": "octavo", "service.version": octavo.__version__})
        self._provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("octavo.engine", octavo.__version__)
        self._of = {
            name: meter.create_histogram(
                name, unit="s", description=text, explicit_bucket_boundaries_advisory=BUCKETS[name]
            )
            for name, text in DESCRIPTIONS.items()
        }
        self._inner = inner
        self._attributes = {
            "gen_ai.operation.name": OPERATION,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        }

    def step(self, record: StepRecord) -> None:
        self._inner.step(record)
        for request in record.ended:
            self._measure(request)

    def rejected(self, reason: str) -> None:
        self._inner.rejected(reason)

    def close(self) -> None:
        """Send the remaining data and stop."""
        self._provider.shutdown()

    def _measure(self, request: RequestRecord) -> None:
        attributes, failed = self._attributes, request.finish_reason is FinishReason.ERROR
        if failed:
            kind = "invalid_request" if request.invalid else "_OTHER"
            self._of[DURATION].record(request.total_s, attributes | {"error.type": kind})
            return
        self._of[DURATION].record(request.total_s, attributes)
        if request.ttft_s is None:
            return
        self._of[FIRST_TOKEN].record(request.ttft_s, attributes)
        if request.generated_tokens > 1:
            rest = (request.total_s - request.ttft_s) / (request.generated_tokens - 1)
            self._of[OUTPUT_TOKEN].record(rest, attributes)


def otlp_reader(endpoint: str) -> MetricReader:
    """Return a reader that exports metrics to an OTLP collector every OTEL_METRIC_EXPORT_INTERVAL ms."""
    exporter = otlp_exporter("metrics", endpoint)
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return PeriodicExportingMetricReader(exporter)
