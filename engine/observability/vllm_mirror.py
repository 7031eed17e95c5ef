"""Octavo's counters and histograms, repeated under vLLM's names.

For dashboards, alerts and gateways made for vLLM. Buckets are Octavo's. ``request_success_total`` counts the
finish reasons that vLLM counts as success.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

from ..api.engine_info import EngineInfo
from ..api.stats import AdapterLoad

NAMES = {  # Octavo's name: vLLM's name
    "octavo_prompt_tokens": "prompt_tokens",
    "octavo_generated_tokens": "generation_tokens",
    "octavo_prefix_cache_query_tokens": "prefix_cache_queries",
    "octavo_prefix_cache_hit_tokens": "prefix_cache_hits",
    "octavo_preemptions": "num_preemptions",
    "octavo_requests": "request_success",
    "octavo_time_to_first_token_seconds": "time_to_first_token_seconds",
    "octavo_inter_token_seconds": "inter_token_latency_seconds",
    "octavo_queue_seconds": "request_queue_time_seconds",
    "octavo_request_seconds": "e2e_request_latency_seconds",
}
LABELS = {"finish_reason": "finished_reason"}
SUCCESS = {"stop", "length", "abort"}


def render_mirror(registry: CollectorRegistry, info: EngineInfo, adapters: AdapterLoad | None) -> bytes:
    """Return the metrics in the Prometheus text format, version 0.0.4; ``adapters``: those in use."""
    families = {family.name: family for family in registry.collect()}
    lines = [line for own, name in NAMES.items() for line in _family(families[own], name, info.name)]
    max_loras, running, waiting = adapters or AdapterLoad(0, (), ())
    in_use = {"running_lora_adapters": ",".join(running), "waiting_lora_adapters": ",".join(waiting)}
    lines += [
        "# HELP vllm:lora_requests_info LoRA adapters whose requests run and wait.",
        "# TYPE vllm:lora_requests_info gauge",
        f"vllm:lora_requests_info{_labels({'max_lora': str(max_loras)} | in_use)} 1.0",
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def _family(family: Metric, name: str, model: str) -> Iterator[str]:
    full = f"vllm:{name}_total" if family.type == "counter" else f"vllm:{name}"
    yield f"# HELP {full} {family.documentation}"
    yield f"# TYPE {full} {family.type}"
    for sample in family.samples:
        if sample.labels.get("finish_reason", "stop") not in SUCCESS:
            continue
        labels = {"model_name": model} | {LABELS.get(key, key): text for key, text in sample.labels.items()}
        suffix = sample.name.removeprefix(family.name)
        number = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
        yield f"vllm:{name}{suffix}{_labels(labels)} {number}"


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"


def escaped(value: str) -> str:
    """Return a label's value, escaped for the text format."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
