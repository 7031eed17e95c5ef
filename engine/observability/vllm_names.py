"""The gauges by which schedulers of inference gateways choose a worker, under vLLM's names.

The endpoint picker of the Gateway API's inference extension, and llm-d's scheduler on top of it,
read queue depth, running requests, cache usage and the shape of the cache from ``/metrics``; their
defaults are these four names (the model server protocol of that project). They carry colons, which
Prometheus keeps for recording rules and its linter refuses, so they are off unless asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..api.engine_info import ModelInfo
from ..api.stats import Gauges


@dataclass(frozen=True, slots=True)
class _Sample:
    name: str
    help: str
    labels: dict[str, str]
    value: float


def render_vllm(gauges: Gauges, info: ModelInfo) -> bytes:
    """Four gauges in the Prometheus text format, version 0.0.4.

    Written here because prometheus_client rewrites colons in names. ``kv_cache_usage_perc`` is a
    ratio from 0 to 1, whatever its name says, as vLLM's is.
    """
    model = {"model_name": info.name}
    pages = gauges.pages_held + gauges.pages_idle_cached + gauges.pages_idle_empty
    config = {"block_size": str(info.page_size), "num_gpu_blocks": str(info.num_pages)}
    samples = (
        _Sample("num_requests_running", "Sequences being computed.", model, gauges.num_running),
        _Sample("num_requests_waiting", "Sequences waiting for room.", model, gauges.num_waiting),
        _Sample(
            "kv_cache_usage_perc",
            "Share of the KV pool's pages held by sequences; 1 is all of them.",
            model,
            gauges.pages_held / (pages or 1),
        ),
        _Sample("cache_config_info", "How the KV cache is set up.", model | config, 1),
    )
    return "".join(_lines(sample) for sample in samples).encode()


def _lines(sample: _Sample) -> str:
    labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels.items())
    name = f"vllm:{sample.name}"
    return f"# HELP {name} {sample.help}\n# TYPE {name} gauge\n{name}{{{labels}}} {sample.value:g}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
