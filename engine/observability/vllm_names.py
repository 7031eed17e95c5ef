"""Gauges under vLLM's names, by which inference gateways choose a worker."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..api.engine_info import EngineInfo
from ..api.stats import Gauges
from .vllm_mirror import escaped


@dataclass(frozen=True, slots=True)
class _Sample:
    name: str
    help: str
    labels: dict[str, str]
    value: float
    type: str = "gauge"


@dataclass(slots=True)
class DraftCounts:
    """Counts of speculative decoding since the start."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)  # accepted drafts by position in a step

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of one sequence in a step, and how many of them were accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.accepted_at.update(range(num_accepted))


def render_vllm(gauges: Gauges, info: EngineInfo, drafts: DraftCounts) -> bytes:
    """Return gauges and counters of speculative decoding in the Prometheus text format, version 0.0.4.
    Written here because prometheus_client rewrites colons in names. ``kv_cache_usage_perc`` is a ratio from 0
    to 1 in spite of its name, as in vLLM."""
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
