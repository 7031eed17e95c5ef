"""What the system grants a server: CPUs, descriptors, and time to end."""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
import sys
import threading
from pathlib import Path

logger = logging.getLogger(__name__)

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
LAST_RESORT_S = 1.0  # later than a deadline


def raise_descriptor_limit() -> None:
    """Let this process open as many files and connections as it may: each client takes one, and at the
    usual soft limit of 1,024 the probes would fail before anything else does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS: "unlimited" is more than it allows
        logger.info("at most %d descriptors, the limit of %d cannot be had: %s", soft, hard, error)


def cpu_quota(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int | None:
    """CPUs that the control groups of this process grant it, rounded down, at least 1; None: no limit.

    A container's limit is one of time, which the scheduler's affinity does not show: more threads than
    that would only be throttled. Reads ``cpu.max`` (version 2) and ``cpu.cfs_quota_us`` (version 1).
    """
    quotas = [quota for folder in _cgroup_folders(cgroups, own) if (quota := _quota(folder)) is not None]
    return max(1, int(min(quotas))) if quotas else None


def available_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cgroup_folders(cgroups: Path, own: Path) -> list[Path]:
    """The folders of this process's groups and of all around them. In a container its own group may be
    mounted at the root."""
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
    except (ValueError, ZeroDivisionError):  # "max"
        return None


class ExitDeadline:
    """Ends the process when it does not end by itself: a step, a thread or a disk may hang."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def start(self, seconds: float, code: int) -> None:
        """The process ends with ``code`` after so many seconds at most; replaces an earlier deadline."""
        self.cancel()
        self._timer = threading.Timer(seconds, _leave, (seconds, code))
        self._timer.daemon = True
        self._timer.start()
        if sys.__stderr__ is not None:  # needs no interpreter lock, should somebody keep that
            faulthandler.dump_traceback_later(seconds + LAST_RESORT_S, exit=True, file=sys.__stderr__)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            faulthandler.cancel_dump_traceback_later()


def _leave(seconds: float, code: int) -> None:
    message = f"octavo serve: not ended {seconds:g} s after the signal; leaving at once"
    print(message, file=sys.stderr, flush=True)
    os._exit(code)
