from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes import fake_info
from octavo.engine.api.address import Address
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.stats import (
    AdapterLoad,
    DraftRecord,
    Gauges,
    RequestRecord,
    StepRecord,
    TenantLoad,
    TenantTokens,
)
from octavo.engine.api.store_counters import DROP_REASONS, StoreCounts, SwapCounts
from octavo.engine.observability.prometheus import Metrics, MetricsServer
from octavo.engine.observability.store_metrics import MAX_TENANTS
from served import METRIC_NAMES

RECORD = StepRecord(
    seconds=0.004,
    prefill_tokens=30,
    decode_tokens=2,
    generated_tokens=3,
    preemptions=1,
    evicted_pages=4,
    query_tokens=40,
    hit_tokens=32,
    gauges=Gauges(num_running=3, num_waiting=5, pages_held=6, pages_idle_cached=3, pages_idle_empty=1),
    miss_tokens={"new": 7, "last_token": 1},
    ttft_s=(0.02,),
    inter_token_s=(0.003, 0.004),
    queue_s=(0.5,),
    drafts=(DraftRecord(5, 2), DraftRecord(2, 1)),
    ended=(
        RequestRecord(
            request_id="r",
            finish_reason=FinishReason.LENGTH,
            prompt_tokens=40,
            cached_tokens=32,
            generated_tokens=9,
            queue_s=0.5,
            ttft_s=0.02,
            total_s=1.5,
        ),
    ),
)


def _samples(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_store_has_metrics_when_there_is_one() -> None:
    metrics = Metrics()
    assert "octavo_store" not in metrics.render().decode()
    counts = StoreCounts(hits=2, misses=3, loaded=5, written=7, dropped={"torn": 1}, num_bytes=11)
    metrics.set_gauges(Gauges(store=counts))
    samples = _samples(metrics.render().decode())
    assert {name: value for name, value in samples.items() if "octavo_store" in name} == {
        "octavo_store_lookups_total,result=hit": 2,
        "octavo_store_lookups_total,result=miss": 3,
        "octavo_store_loaded_pages_total": 5,
        "octavo_store_written_pages_total": 7,
        "octavo_store_bytes": 11,
    } | {f"octavo_store_dropped_pages_total,reason={reason}": reason == "torn" for reason in DROP_REASONS}


def test_memory_beside_the_pool_has_metrics_when_there_is_some() -> None:
    metrics = Metrics()
    assert "octavo_swap" not in metrics.render().decode()
    metrics.set_gauges(Gauges(swap=SwapCounts(num_out=5, num_in=3, num_bytes=700)))
    samples = _samples(metrics.render().decode())
    assert {name: value for name, value in samples.items() if "octavo_swap" in name} == {
        "octavo_swapped_pages_total,direction=out": 5,
        "octavo_swapped_pages_total,direction=in": 3,
        "octavo_swap_bytes": 700,
    }


def test_images_have_metrics() -> None:
    metrics = Metrics()
    metrics.step(replace(RECORD, gauges=Gauges(media_waits=3), encoded_s=(0.2, 0.3), image_hits=4))
    samples = _samples(metrics.render().decode())
    assert {name: value for name, value in samples.items() if "image" in name and "le=" not in name} == {
        "octavo_image_encoding_seconds_count": 2,
        "octavo_image_encoding_seconds_sum": 0.5,
        "octavo_image_cache_hits_total": 4,
    }
    assert samples["octavo_requests_waiting_for_media"] == 3


def test_tenants_have_metrics_under_a_bounded_number_of_labels() -> None:
    metrics = Metrics()
    many = {f"t{number}": TenantLoad(1, 2) for number in range(MAX_TENANTS + 5)}
    tokens = {name: TenantTokens(10, 3) for name in many}
    metrics.step(replace(RECORD, gauges=Gauges(tenants=many), tenant_tokens=tokens))
    samples = _samples(metrics.render().decode())
    assert sum("tenant_requests_running" in name for name in samples) == MAX_TENANTS + 1
    assert samples["octavo_tenant_requests_waiting,tenant=t0"] == 2
    assert samples["octavo_tenant_requests_waiting,tenant=(others)"] == 10
    assert samples["octavo_tenant_served_tokens_total,kind=prompt,tenant=t0"] == 10
    assert samples["octavo_tenant_served_tokens_total,kind=output,tenant=(others)"] == 15
    metrics.set_gauges(Gauges(tenants={"t1": TenantLoad(4, 0)}))
    samples = _samples(metrics.render().decode())
    running = {name: value for name, value in samples.items() if "tenant_requests_running" in name}
    assert {name for name, value in running.items() if value} == {"octavo_tenant_requests_running,tenant=t1"}


def test_every_name_is_there_from_the_start() -> None:
    metrics = Metrics()
    metrics.describe(fake_info(EngineConfig()))
    metrics.set_gauges(Gauges())
    text = metrics.render().decode()
    assert {name.split(",")[0] for name in _samples(text)} >= METRIC_NAMES
    assert not any("_created" in name for name in _samples(text))
    for line in text.splitlines():
        assert ":" not in line.split("{")[0].split(" ")[0]
        if line.startswith("# HELP"):
            assert len(line.split(" ", 3)[3]) > 5, f"no help: {line}"


def test_vllm_metric_names_are_exported_on_request() -> None:
    metrics = Metrics(with_vllm_names=True)
    info = replace(fake_info(EngineConfig()), name='a "model"', page_size=32, num_pages=10)
    metrics.describe(info)
    metrics.step(RECORD)
    values = {name: value for name, value in _samples(metrics.render().decode()).items() if "vllm:" in name}
    expected = {
        'vllm:num_requests_running,model_name=a "model"': 3,
        'vllm:num_requests_waiting,model_name=a "model"': 5,
        'vllm:kv_cache_usage_perc,model_name=a "model"': 0.6,
        'vllm:cache_config_info,block_size=32,model_name=a "model",num_gpu_blocks=10': 1,
        'vllm:spec_decode_num_drafts_total,model_name=a "model"': 2,
        'vllm:spec_decode_num_draft_tokens_total,model_name=a "model"': 7,
        'vllm:spec_decode_num_accepted_tokens_total,model_name=a "model"': 3,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total,model_name=a "model",position=0': 2,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total,model_name=a "model",position=1': 1,
        "vllm:lora_requests_info,max_lora=0,running_lora_adapters=,waiting_lora_adapters=": 1,
    }
    assert {name: values.get(name) for name in expected} == expected

    own = _samples(metrics.render().decode())
    model = ',model_name=a "model"'
    for name, theirs in {
        "prompt_tokens_total": "prompt_tokens_total",
        "generation_tokens_total": "generated_tokens_total",
        "prefix_cache_queries_total": "prefix_cache_query_tokens_total",
        "prefix_cache_hits_total": "prefix_cache_hit_tokens_total",
        "num_preemptions_total": "preemptions_total",
        "time_to_first_token_seconds_count": "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_sum": "inter_token_seconds_sum",
        "request_queue_time_seconds_count": "queue_seconds_count",
        "e2e_request_latency_seconds_count": "request_seconds_count",
    }.items():
        assert values[f"vllm:{name}{model}"] == own[f"octavo_{theirs}"] > 0, name
    assert {name for name in values if "success" in name} == {
        f"vllm:request_success_total,finished_reason={reason}{model}"
        for reason in ("stop", "length", "abort")
    }
    metrics.set_gauges(Gauges(adapters=AdapterLoad(4, ("a", "b"), ("c",))))
    lora = "vllm:lora_requests_info,max_lora=4,running_lora_adapters=a,b,waiting_lora_adapters=c"
    assert _samples(metrics.render().decode())[lora] == 1
    assert any(name.startswith("vllm:time_to_first_token_seconds_bucket,le=0.001") for name in values)


def test_one_step_moves_every_figure() -> None:
    metrics = Metrics()
    metrics.step(RECORD)
    metrics.step(RECORD)
    metrics.rejected("too_long")
    values = _samples(metrics.render().decode())
    expected = {
        "octavo_requests_running": 3, "octavo_requests_waiting": 5, "octavo_kv_pages,state=held": 6,
        "octavo_kv_pages,state=idle_cached": 3, "octavo_kv_pages,state=idle_empty": 1,
        "octavo_kv_usage_ratio": 0.6, "octavo_prefix_cache_query_tokens_total": 80,
        "octavo_prefix_cache_hit_tokens_total": 64, "octavo_prefix_cache_miss_tokens_total,reason=new": 14,
        "octavo_prefix_cache_miss_tokens_total,reason=last_token": 2, "octavo_evicted_pages_total": 8,
        "octavo_preemptions_total": 2, "octavo_prompt_tokens_total": 80, "octavo_generated_tokens_total": 6,
        "octavo_requests_total,finish_reason=length": 2, "octavo_requests_total,finish_reason=stop": 0,
        "octavo_rejected_requests_total,reason=too_long": 1, "octavo_step_seconds_count": 2,
        "octavo_step_tokens_sum,kind=prefill": 60, "octavo_step_tokens_sum,kind=decode": 4,
        "octavo_time_to_first_token_seconds_count": 2, "octavo_inter_token_seconds_count": 4,
        "octavo_drafts_total": 4, "octavo_spec_drafted_tokens_total": 14,
        "octavo_spec_accepted_tokens_total": 6,
        "octavo_spec_accepted_tokens_per_position_total,position=0": 4,
        "octavo_spec_accepted_tokens_per_position_total,position=1": 2,
        "octavo_queue_seconds_sum": 1.0, "octavo_request_seconds_sum": 3.0,
        "octavo_inter_token_seconds_bucket,le=0.001": 0, "octavo_inter_token_seconds_bucket,le=0.005": 4,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == pytest.approx(expected)


def test_a_step_without_decodes_is_no_zero_in_their_histogram() -> None:
    metrics = Metrics()
    quiet = StepRecord(
        seconds=0.1, prefill_tokens=5, decode_tokens=0, generated_tokens=0, preemptions=0, evicted_pages=0,
        query_tokens=0, hit_tokens=0, gauges=Gauges(),
    )  # fmt: skip
    metrics.step(quiet)
    values = _samples(metrics.render().decode())
    assert values["octavo_step_tokens_count,kind=decode"] == 0
    assert values["octavo_step_tokens_count,kind=prefill"] == 1
    assert values["octavo_kv_usage_ratio"] == 0


class FakeProbes:
    def __init__(self) -> None:
        self.dead: str | None = None
        self.busy: str | None = None

    def gauges(self) -> Gauges:
        return Gauges(num_waiting=11)

    def holders(self) -> dict[str, int]:
        return {"calls": 5, "watchers": 0}

    def alive(self) -> str | None:
        return self.dead

    def ready(self) -> str | None:
        return self.dead or self.busy


@pytest.fixture
def probes() -> FakeProbes:
    return FakeProbes()


@pytest.fixture
def server(probes: FakeProbes) -> Iterator[MetricsServer]:
    server = MetricsServer(Address("127.0.0.1", 0), Metrics(), probes)
    yield server
    server.close()


def _get(server: MetricsServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{server.address}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_scrape_shows_how_the_engine_stands_now(server: MetricsServer) -> None:
    status, text = _get(server, "/metrics")
    assert status == 200
    assert _samples(text)["octavo_requests_waiting"] == 11
    assert _samples(text)["octavo_holders,kind=calls"] == 5


def test_probes(server: MetricsServer, probes: FakeProbes) -> None:
    assert _get(server, "/healthz")[0] == _get(server, "/readyz")[0] == 200
    probes.busy = "loading"
    assert _get(server, "/healthz")[0] == 200
    status, text = _get(server, "/readyz")
    assert (status, json.loads(text)["reason"]) == (503, "loading")
    probes.dead = "broken"
    status, text = _get(server, "/healthz")
    assert (status, json.loads(text)["reason"]) == (503, "broken")
    assert _get(server, "/nothing")[0] == 404


def test_a_port_in_use(server: MetricsServer, probes: FakeProbes) -> None:
    with pytest.raises(InvalidConfig, match=r"port is in use.*--metrics"):
        MetricsServer(server.address, Metrics(), probes)


def test_errors_caused_by_parameters_are_not_engine_errors() -> None:
    """Alerts count finish_reason="error", so clients must not be able to cause it."""
    metrics = Metrics()
    failed = replace(RECORD.ended[0], finish_reason=FinishReason.ERROR)
    metrics.step(
        replace(RECORD, ended=(failed, replace(failed, invalid=True), replace(failed, invalid=True)))
    )
    found = _samples(metrics.render().decode())
    assert found["octavo_requests_total,finish_reason=error"] == 1
    assert found["octavo_requests_total,finish_reason=invalid"] == 2


def test_when_the_process_began_is_exported() -> None:
    """Alerts detect crash loops by this metric."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("prometheus_client reads it from /proc")
    assert _samples(Metrics().render().decode())["process_start_time_seconds"] > 1e9
