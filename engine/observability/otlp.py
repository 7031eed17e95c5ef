from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from ..api.errors import InvalidConfig


def endpoint_of(signal: str, variables: Mapping[str, str] = os.environ) -> str | None:
    """Return the OTLP endpoint for "traces" or "metrics", or None. Raises InvalidConfig for an unsupported
    exporter or protocol."""
    name = signal.upper()
    if variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    endpoint = variables.get(f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT") or variables.get(
        "OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    if not endpoint:
        return None
    match exporter := variables.get(f"OTEL_{name}_EXPORTER") or "otlp":
        case "none":
            return None
        case "otlp":
            pass
        case _:
            raise InvalidConfig(
                f"OTEL_{name}_EXPORTER={exporter} is not supported; use otlp, or none to turn it off"
            )
    protocol = variables.get(f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL") or variables.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    if protocol not in (None, "", "grpc"):
        raise InvalidConfig(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} is not supported; use grpc, usually on port 4317"
        )
    return endpoint


_EXPORTERS = {
    "traces": ("trace", "trace_exporter", "OTLPSpanExporter"),
    "metrics": ("metrics", "metric_exporter", "OTLPMetricExporter"),
}


def otlp_exporter(signal: str, endpoint: str) -> Any:
    """Return an exporter for OTLP over gRPC. Raises InvalidConfig without the extra ``tracing``, or for an
    invalid endpoint."""
    sdk, module, name = _EXPORTERS[signal]
    try:
        importlib.import_module(f"opentelemetry.sdk.{sdk}")
        make = getattr(importlib.import_module(f"opentelemetry.exporter.otlp.proto.grpc.{module}"), name)
    except ImportError as error:
        raise InvalidConfig(
            f"OpenTelemetry's {signal} need its packages ({error}); in the checkout run `pip install "
            f"'.[tracing]'`, leave --otlp-{signal}-endpoint out, or set OTEL_{signal.upper()}_EXPORTER=none"
        ) from None
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidConfig(
            f"--otlp-{signal}-endpoint must be an http:// or https:// address, got {endpoint!r}; a collector "
            "on this machine is usually http://127.0.0.1:4317"
        )
    return make(endpoint=endpoint, insecure=endpoint.startswith("http://"))
