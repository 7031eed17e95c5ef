"""What OpenTelemetry's environment variables say of where spans and metrics go."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..api.errors import InvalidConfig


def endpoint_of(signal: str, variables: Mapping[str, str] = os.environ) -> str | None:
    """Where OpenTelemetry's own variables say that ``signal`` ("traces", "metrics") goes over OTLP; None if
    they do not say so, or switch it off. InvalidConfig for an exporter or a protocol that is not there."""
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
                f"OTEL_{name}_EXPORTER={exporter} is not supported; use otlp, or none to send none"
            )
    protocol = variables.get(f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL") or variables.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    if protocol not in (None, "", "grpc"):
        raise InvalidConfig(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} is not supported; use grpc, usually on port 4317"
        )
    return endpoint
