"""Rules and dashboards of ``deploy``, evaluated by a Prometheus that scraped a busy server."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import subprocess
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import dashboard_panels
import dashboards
from fakes import fake_info, small_config
from live_prometheus import DEPLOY, RULES, in_prometheus, live_prometheus, query
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import DraftRecord, Gauges, StepRecord, TenantLoad, TenantTokens
from octavo.engine.api.store_counters import StoreCounts, SwapCounts
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.client.client import Client
from octavo.engine.client.credentials import ClientCredentials
from octavo.engine.client.server_process import ServerProcess
from octavo.engine.observability.prometheus import Metrics
from served import collect, eventually_async

pytestmark = pytest.mark.server

GRAFANA = DEPLOY / "grafana"
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs prometheus and promtool (Debian package `prometheus`)",
)


def _promtool(*arguments: str | Path, stdin: str = "") -> str:
    command = ["promtool", *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_prometheus
def test_rules_and_their_unit_tests_pass_promtool() -> None:
    _promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    _promtool("check", "rules", "--lint=all", "--lint-fatal", *RULES)
    _promtool("test", "rules", DEPLOY / "prometheus" / "tests.yml")


def test_every_alert_has_a_unit_test_that_fires_it() -> None:
    tests = (DEPLOY / "prometheus" / "tests.yml").read_text()
    alerts = re.findall(r"- alert: (\w+)", RULES[1].read_text())
    assert alerts
    for alert in alerts:
        assert re.search(rf"alertname: {alert}\n +exp_alerts:\n", tests), alert
        assert alert == "OctavoDown" or f"alertname: {alert}\n        exp_alerts: []" in tests, alert


def test_dashboards_equal_the_scripts_output() -> None:
    pages = {f"{page.uid}.json": dashboards.build(page) for page in dashboard_panels.DASHBOARDS}
    assert pages == {path.name: path.read_text() for path in GRAFANA.glob("*.json")}


def test_panels_fill_grafanas_grid_without_overlap() -> None:
    for path in GRAFANA.glob("*.json"):
        taken: set[tuple[int, int]] = set()
        for panel in json.loads(path.read_text())["panels"]:
            x, y, width, height = (panel["gridPos"][key] for key in "xywh")
            assert x + width <= 24, panel["title"]
            cells = {(x + i, y + j) for i in range(width) for j in range(height)}
            assert not taken & cells, panel["title"]
            taken |= cells


def panel_expressions() -> dict[str, str]:
    found = {}
    for path in sorted(GRAFANA.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                found[f"{path.stem}: {panel['title']} {target['refId']}"] = in_prometheus(target["expr"])
    return found


async def _has_numbers(address: str, expression: str) -> bool:
    result = (await query(address, "query", query=expression))["result"]
    values = [sample["value"] for sample in result]
    return any(isinstance(value, list) and math.isfinite(float(value[1])) for value in values)


async def _load(client: Client, stop: asyncio.Event) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    words = "what must be said leaves no choice, so all of it is drafted"
    forced = SamplingParams(structured=StructuredOutput(choice=(words,)), speculate="ngram")
    number = 0
    while not stop.is_set():
        prompts = [[5 + i % 90 for i in range(64)] + [7 + number + sample] * 9 for sample in range(4)]
        await asyncio.gather(*(collect(client.generate(prompt, params)) for prompt in prompts))
        await collect(client.generate([5, 6, 7, number], forced))
        number += 1


def test_panels_show_metrics_that_there_are_by_labels_that_they_have() -> None:
    metrics = Metrics(with_vllm_names=False)
    metrics.describe(fake_info(small_config()))
    tenants = {"alice": TenantLoad(1, 2)}
    gauges = Gauges(tenants=tenants, store=StoreCounts(), swap=SwapCounts())
    metrics.step(
        StepRecord(
            seconds=0.1,
            prefill_tokens=3,
            decode_tokens=4,
            generated_tokens=4,
            preemptions=1,
            evicted_pages=2,
            query_tokens=9,
            hit_tokens=6,
            gauges=gauges,
            miss_tokens={"new": 3},
            drafts=(DraftRecord(3, 1),),
            tenant_tokens={"alice": TenantTokens(3, 4)},
            predicted_s=0.1,
        )
    )
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for name, expression in panel_expressions().items():
        shown = set(re.findall(r"octavo_\w+", expression))
        assert shown <= labels.keys(), name
        for by, metric in re.findall(r"by \(([^)]*)\) \((?:rate\()?(octavo_\w+)", expression):
            assert set(by.split(", ")) - {"instance"} <= labels[metric], name


@pytest.mark.slow
@needs_prometheus
async def test_every_expression_returns_data_from_a_server_under_load(tmp_path: Path) -> None:
    flags = ["--num-pages", "64", "--max-running", "8", "--max-step-tokens", "64"]
    flags += ["--cache-dir", str(tmp_path / "pages"), "--swap-memory", "1MiB"]
    flags += ["--auth-token-file", str(tokens := tmp_path / "tokens")]
    tokens.write_text("alice alice-0123456789\n")
    (own := tmp_path / "alice").write_text("alice-0123456789\n")
    async with (
        ServerProcess(flags) as server,
        Client(server.ready["grpc"], ClientCredentials(token_file=own)) as client,
        live_prometheus(server.ready["metrics"], tmp_path) as address,
    ):
        stop = asyncio.Event()
        load = asyncio.create_task(_load(client, stop))
        try:
            await _check_expressions(address)
            assert not load.done(), "the load ended early"
        finally:
            stop.set()
            await load
        metrics = await asyncio.to_thread(_read, f"http://{server.ready['metrics']}/metrics")
        _promtool("check", "metrics", stdin=metrics)


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return str(reply.read().decode())


async def _check_expressions(address: str) -> None:
    expressions = panel_expressions()
    assert len(expressions) > 40
    groups = (await query(address, "rules"))["groups"]
    for group in groups:
        rules = group["rules"]
        assert isinstance(rules, list)
        for rule in rules:
            expressions[rule["name"]] = re.sub(r"(==|[<>]=?)(?=\s*[\d.])", r"\1 bool", rule["query"])
            if rule["type"] == "recording":
                expressions[f"record {rule['name']}"] = rule["name"]
    assert len(expressions) > 70
    for name, expression in expressions.items():
        await eventually_async(partial(_has_numbers, address, expression), f"{name}: {expression}")
