"""Octavo's metrics under vLLM's names, for existing dashboards."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..api.engine_info import EngineInfo
from ..api.stats import AdapterLoad

NAMES = {  # vLLM's names by Octavo's names
    "octavo_requests_running": "num_requests_running",
    "octavo_requests_waiting": "num_requests_waiting",
    "octavo_kv_usage_ratio": "kv_cache_usage_perc",
    "octavo_drafts": "spec_decode_num_drafts",
    "octavo_spec_drafted_tokens": "spec_decode_num_draft_tokens",
    "octavo_spec_accepted_tokens": "spec_decode_num_accepted_tokens",
    "octavo_spec_accepted_tokens_per_position": "spec_decode_num_accepted_tokens_per_pos",
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


def render_vllm(registry: CollectorRegistry, info: EngineInfo, adapters: AdapterLoad | None) -> bytes:
    """Return metrics in the Prometheus text format."""
    mirror = CollectorRegistry()
    mirror.register(_Mirror(registry, info, adapters or AdapterLoad(0, (), ())))
    text: bytes = generate_latest(mirror)
    return text


class _Mirror(Collector):
    def __init__(self, registry: CollectorRegistry, info: EngineInfo, adapters: AdapterLoad) -> None:
        self._registry = registry
        self._info = info
        self._adapters = adapters

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        info, (max_loras, running, waiting) = self._info, self._adapters
        families = {family.name: family for family in self._registry.collect()}
        for own, name in NAMES.items():
            yield _renamed(families[own], f"vllm:{name}", info.name)
        config = {"block_size": str(info.page_size), "num_gpu_blocks": str(info.num_pages)}
        in_use = {"running_lora_adapters": ",".join(running), "waiting_lora_adapters": ",".join(waiting)}
        for name, text, labels in (
            ("cache_config_info", "Settings of the KV cache.", {"model_name": info.name} | config),
            ("lora_requests_info", "Adapters in use.", {"max_lora": str(max_loras)} | in_use),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=list(labels))
            gauge.add_metric(list(labels.values()), 1)
            yield gauge


def _renamed(family: Metric, name: str, model: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        if sample.labels.get("finish_reason", "stop") in SUCCESS:
            labels = {"model_name": model} | {
                LABELS.get(key, key): text for key, text in sample.labels.items()
            }
            renamed.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
    return renamed
