from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def available_threads() -> int:
    """Return the number of CPUs that this process may use, by its affinity and its cgroup quota."""
    return min(allowed_cpus(), cpu_quota() or allowed_cpus())


def cpu_quota(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int | None:
    """Return how many whole CPUs the cgroups of this process grant, at least 1; None without a limit.

    Reads ``cpu.max`` (cgroup version 2) and ``cpu.cfs_quota_us`` (version 1).
    """
    quotas = [quota for folder in _cgroup_folders(cgroups, own) if (quota := _quota(folder)) is not None]
    return max(1, int(min(quotas))) if quotas else None


def allowed_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cgroup_folders(cgroups: Path, own: Path) -> list[Path]:
    folders = [cgroups, cgroups / "cpu"]
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            root = cgroups if controllers == "" else cgroups / "cpu"
            below = root / path.lstrip("/")
            folders += [below, *(parent for parent in below.parents if root in parent.parents)]
    return folders


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max", which means no limit
        return None
