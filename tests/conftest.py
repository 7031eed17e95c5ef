from __future__ import annotations

import faulthandler
import gc
import os
import sys
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, Phase, settings

from native import load_extension

settings.register_profile(
    "default", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "nightly", max_examples=4000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(  # for make quick
    "quick", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(  # for tests/mutants: finds bugs, but does not shrink them
    "mutants",
    max_examples=300,
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
if sys.platform != "darwin":  # on a CPU, MLX runs a C++ compiler for each new function
    os.environ["MLX_DISABLE_COMPILE"] = "1"
load_extension()
pytest_plugins = ["attention_backends"]
LEAVE_S = 120.0  # seconds that the process may take to end after the last test
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

LONGEST_FIRST = (
    "tests/kernels/cpu/test_pages.py",  # builds the emulated extension, on all cores
    "tests/engine/executor/vision/test_tokens.py",
    "tests/engine/executor/adapters/test_tokens.py",
    "tests/engine/executor/parallel/test_ranks.py",
    "tests/kernels/cpu/test_attention.py",
    "tests/engine/executor/native/test_linear.py",
    "tests/engine/executor/native/test_comparison.py",
    "tests/engine/speculation/test_draft_model.py",
    "tests/kernels/metal/test_attention.py",
    "tests/engine/grpc/test_recurrent.py",
    "tests/kernels/reference/test_attention.py",
    "tests/engine/http/test_http.py",
    "tests/kernels/cpu/test_native_sampling.py",
    "tests/engine/executor/adapters/test_layers.py",
    "tests/engine/executor/load/test_models_probe.py",
    "tests/engine/executor/test_models.py",
    "tests/kernels/metal/test_launch.py",
)
"""Slow test files, started first so that no worker is idle at the end."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    _leave_few(items)
    yield
    places = {file: place for place, file in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def _leave_few(items: list[pytest.Item]) -> None:
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        few, slow = item.get_closest_marker("few"), item.get_closest_marker("slow")
        if few is not None and slow is None:
            cases.setdefault((item.nodeid.partition("[")[0], few.args[0]), []).append(item)
    for (_, count), own in cases.items():
        kept = {number * len(own) // count - 1 for number in range(1, count + 1)}
        for number, item in enumerate(own):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Exclude collected tests from garbage collection, which runs whenever a model is loaded."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print failures at once, because an interrupted run has no summary."""
    if report.failed and os.environ.get("CI") and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext[-1500:]}", flush=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Print the stack of a thread or process that does not end."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        faulthandler.dump_traceback_later(LEAVE_S, exit=True)
