"""Octavo's metrics under vLLM's names, for existing dashboards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

from ..api.engine_info import EngineInfo
from ..api.stats import AdapterLoad, Gauges


@dataclass(frozen=True, slots=True)
class _Sample:
    name: str
    help: str
    labels: dict[str, str]
    value: float
    type: str = "gauge"


@dataclass(slots=True)
class DraftCounts:
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)  # accepted draft tokens by position

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count the proposed and accepted draft tokens of one sequence in one step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.accepted_at.update(range(num_accepted))


def render_vllm(gauges: Gauges, info: EngineInfo, drafts: DraftCounts) -> bytes:
    """Return gauges in the Prometheus text format."""
    model = {"model_name": info.name}
    pages = gauges.pages_held + gauges.pages_idle_cached + gauges.pages_idle_empty
    config = {"block_size": str(info.page_size), "num_gpu_blocks": str(info.num_pages)}
    samples = (
        _Sample("num_requests_running", "Sequences being computed.", model, gauges.num_running),
        _Sample("num_requests_waiting", "Sequences waiting to be admitted.", model, gauges.num_waiting),
        _Sample(
            "kv_cache_usage_perc",
            "Share of the KV pool's pages held by sequences; 1 is all of them.",
            model,
            gauges.pages_held / (pages or 1),
        ),
        _Sample("cache_config_info", "Settings of the KV cache, as labels.", model | config, 1),
    )
    counters = (
        ("num_drafts", "Times that a step verified draft tokens of a sequence.", drafts.num_drafts),
        ("num_draft_tokens", "Draft tokens computed.", drafts.num_draft_tokens),
        ("num_accepted_tokens", "Draft tokens accepted.", drafts.accepted_at.total()),
    )
    spec = [
        _Sample(f"spec_decode_{name}_total", text, model, value, "counter") for name, text, value in counters
    ]
    per_position = [
        _Sample("spec_decode_num_accepted_tokens_per_pos_total",
        "Draft tokens accepted, by position in the draft.",
                model | {"position": str(position)}, count, "counter")
        for position, count in sorted(drafts.accepted_at.items())
    ]  # fmt: skip
    head = "".join(_head(sample) + _line(sample) for sample in (*samples, *spec))
    tail = "".join(map(_line, per_position))
    return (head + (_head(per_position[0]) + tail if per_position else "")).encode()


def _head(sample: _Sample) -> str:
    return f"# HELP vllm:{sample.name} {sample.help}\n# TYPE vllm:{sample.name} {sample.type}\n"


def _line(sample: _Sample) -> str:
    labels = ",".join(f'{name}="{escaped(value)}"' for name, value in sample.labels.items())
    return f"vllm:{sample.name}{{{labels}}} {sample.value:.12g}\n"


NAMES = {  # vLLM's names by Octavo's names
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
    """Return metrics in the Prometheus text format."""
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
    """Return a label value, escaped for the Prometheus text format."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
