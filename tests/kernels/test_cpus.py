from __future__ import annotations

from pathlib import Path

import pytest

from octavo.kernels import backends, cpus
from octavo.kernels.cpus import available_threads, cpu_quota


@pytest.mark.parametrize(
    ("files", "own", "quota"),
    [
        ({"cpu.max": "250000 100000"}, "0::/", 2),
        ({"cpu.max": "50000 100000"}, "0::/", 1),
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b", 3),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "400000 100000"}, "0::/a/b", 3),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/", 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/", None),
        ({"cpu.max": "nonsense"}, "0::/", None),
        ({}, "0::/gone", None),
    ],
)
def test_threads_follow_the_control_group(
    tmp_path: Path, files: dict[str, str], own: str, quota: int | None
) -> None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "own").write_text(own + "\n")
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "own") == quota


@pytest.mark.parametrize(("quota", "threads"), [(2, 2), (16, 16), (32, 16), (None, 16)])
def test_threads_of_a_container_are_its_cpus(
    monkeypatch: pytest.MonkeyPatch, quota: int | None, threads: int
) -> None:
    monkeypatch.setattr(cpus, "allowed_cpus", lambda: 16)
    monkeypatch.setattr(cpus, "cpu_quota", lambda: quota)
    assert available_threads() == threads


def test_native_kernels_respect_the_cpu_quota_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    _ext = pytest.importorskip("octavo.kernels._ext")
    before = _ext.threads()
    monkeypatch.setattr(backends, "allowed_cpus", lambda: 16)
    monkeypatch.setattr(backends, "available_threads", lambda: 1)
    try:
        backends.choose_backend("cpu", 2)
        assert _ext.threads() == 2
        backends.choose_backend("cpu")
        assert _ext.threads() == 1
    finally:
        _ext.set_threads(before)
