"""The rules and dashboards under ``deploy``, against a Prometheus that scraped a server under load."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from octavo.engine.client import Client
from octavo.engine.params import SamplingParams
from octavo.engine.server.process import ServerProcess
from served import collect, eventually_async

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = [DEPLOY / "prometheus" / name for name in ("recording.yml", "alerts.yml")]
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


def test_dashboards_are_what_the_script_writes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="needs the extra `dashboards`")
    dashboards = importlib.import_module("dashboards")
    pages = {f"{page.uid}.json": dashboards.build(page) for page in dashboards.DASHBOARDS}
    assert pages == {path.name: path.read_text() for path in GRAFANA.glob("*.json")}


def panel_expressions() -> dict[str, str]:
    """Of every panel, as Prometheus reads them: Grafana's variables filled in."""
    found = {}
    for path in sorted(GRAFANA.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
                found[f"{path.stem}: {panel['title']} {target['refId']}"] = expression
    return found


async def _query(address: str, path: str, **parameters: str) -> dict[str, list[dict[str, object]]]:
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"

    def get() -> dict[str, list[dict[str, object]]]:
        with urllib.request.urlopen(url, timeout=10) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        data: dict[str, list[dict[str, object]]] = answer["data"]
        return data

    return await asyncio.to_thread(get)


async def _has_numbers(address: str, expression: str) -> bool:
    result = (await _query(address, "query", query=expression))["result"]
    values = [sample["value"] for sample in result]
    return any(isinstance(value, list) and math.isfinite(float(value[1])) for value in values)


@asynccontextmanager
async def _prometheus(target: str, folder: Path) -> AsyncIterator[str]:
    """The deployed configuration, scraping ``target`` more often; its address."""
    config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:9400", target).replace("15s", "1s")
    (folder / "prometheus.yml").write_text(config)
    for rules in RULES:
        shutil.copy(rules, folder)
    process = await asyncio.create_subprocess_exec(
        "prometheus", "--config.file", folder / "prometheus.yml", "--storage.tsdb.path", folder / "data",
        "--web.listen-address", "127.0.0.1:0", stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    reader = None
    try:
        async with asyncio.timeout(30):
            while not (at := re.search(rb'"Listening on" address=(\S+)', await process.stderr.readline())):
                assert not process.stderr.at_eof(), "Prometheus did not start"
            # It listens, and answers 503, before it is ready.
            while b"Server is ready" not in await process.stderr.readline():
                assert not process.stderr.at_eof(), "Prometheus did not get ready"
        reader = asyncio.create_task(process.stderr.read())
        yield at[1].decode()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        if reader is not None:
            await reader


async def _load(client: Client, stop: asyncio.Event) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    number = 0
    while not stop.is_set():
        prompts = [[5 + i % 90 for i in range(64)] + [7 + number + sample] * 9 for sample in range(4)]
        await asyncio.gather(*(collect(client.generate(prompt, params)) for prompt in prompts))
        number += 1


@needs_prometheus
async def test_every_expression_returns_data_from_a_server_under_load(tmp_path: Path) -> None:
    flags = ["--num-pages", "64", "--max-running", "8", "--max-step-tokens", "64"]
    async with (
        ServerProcess(flags) as server,
        Client(server.ready["grpc"]) as client,
        _prometheus(server.ready["metrics"], tmp_path) as address,
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
    groups = (await _query(address, "rules"))["groups"]
    for group in groups:
        rules = group["rules"]
        assert isinstance(rules, list)
        for rule in rules:  # what an alert compares: 0 or 1 instead of nothing while it is silent
            expressions[rule["name"]] = re.sub(r"(==|[<>]=?)(?=\s*[\d.])", r"\1 bool", rule["query"])
            if rule["type"] == "recording":
                expressions[f"record {rule['name']}"] = rule["name"]
    assert len(expressions) > 70
    for name, expression in expressions.items():
        await eventually_async(partial(_has_numbers, address, expression), f"{name}: {expression}")
