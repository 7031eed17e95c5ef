"""Do the tests of the Python code earn their keep? Seed bugs, one at a time, and count catches.

``python tests/mutants/run.py [WORD]`` copies folders of the repository to a scratch folder, plants each
bug of in_scheduler.py, in_policies.py, in_states.py, in_swap.py and in_engine.py (with WORD: those that
have it in the name) there and runs the tests of its folder against it. Prints a table; exits 1 if the tests
miss a bug, or fail without one. Some minutes.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import in_engine
import in_policies
import in_scheduler
import in_states
import in_swap
from harness import hunt, run_tests, spoilt
from mutant import FOLDERS, ROOT, Mutant

Suite = tuple[str, ...]
"""Tests that are to catch bugs of some files."""

CONTROL_PLANE: Suite = (
    "tests/block_manager/test_block_manager.py",
    "tests/block_manager/test_window_groups.py",
    "tests/block_manager/test_passed_pages.py",
    "tests/block_manager/test_residual_pages.py",
    "tests/block_manager/test_events.py",
    "tests/scheduler/test_scheduler.py",
    "tests/scheduler/test_commits.py",
    "tests/scheduler/waiting/test_fair.py",
    "tests/scheduler/test_long_prompts.py",
    "tests/scheduler/test_arrivals.py",
    "tests/scheduler/test_parallel_samples.py",
    "tests/scheduler/test_priority.py",
    "tests/scheduler/test_latency_target.py",
    "tests/scheduler/test_targets.py",
    "tests/scheduler/test_planned_drafts.py",
    "tests/scheduler/test_step_cost.py",
    "tests/scheduler/test_deadlines.py",
    "tests/scheduler/test_orders.py",
    "tests/scheduler/test_preemption.py",
    "tests/block_manager/test_machine.py",
    "tests/block_manager/test_prefix_oracle.py",
    "tests/scheduler/test_serving.py",
    "tests/scheduler/waiting/test_fairness.py",
    "tests/scheduler/test_preemption_bounds.py",
    "tests/scheduler/test_starvation.py",
    "tests/scheduler/test_deadlines_at_random.py",
)
STATES: Suite = (
    "tests/block_manager/test_recurrent_states.py",
    "tests/block_manager/test_state_machine.py",
    "tests/scheduler/test_serving.py",
)
ENGINE: dict[str, Suite] = {
    "engine/executor/batch.py": ("tests/engine/executor/test_batch.py",),
    "engine/executor/capture/graph_runner.py": (
        "tests/engine/executor/capture/test_fusion.py::test_steps_of_as_many_rows_are_told_apart",
        "tests/engine/executor/test_models_runner.py::test_keys_that_are_not_finite_are_found_in_steps_that_repeat",
        "tests/engine/executor/native/test_greedy_head.py",
        "tests/engine/executor/capture/test_fusion.py",
    ),
    "kernels/cpu/backend.py": (
        "tests/engine/executor/test_models_runner.py",
        "tests/engine/executor/capture/test_fusion.py",
    ),
    "engine/executor/native/mapped.py": ("tests/engine/executor/native/test_mapped.py",),
    "engine/core/overlap.py": ("tests/engine/core/test_overlap.py",),
    "engine/executor/device_step.py": ("tests/engine/executor/test_steps_in_flight.py",),
    "engine/executor/sampling/device_sampling.py": (
        "tests/engine/executor/sampling/test_device_sampling.py",
    ),
    "engine/executor/recurrent/state_pool.py": (
        "tests/kernels/test_state_segments.py",
        "tests/engine/executor/recurrent/test_recurrent_models.py",
    ),
    "engine/executor/recurrent/cuts.py": ("tests/engine/executor/recurrent/test_recurrent_models.py",),
    "block_manager/state_group.py": ("tests/block_manager/test_recurrent_states.py",),
    "engine/executor/recurrent/segments.py": ("tests/engine/executor/recurrent/test_speculation.py",),
    "engine/executor/native/model_ops.py": ("tests/engine/executor/native/test_mapped.py",),
}


SWAP: Suite = (
    "tests/scheduler/test_swap.py",
    "tests/engine/kv_store/test_windows.py::test_a_plan_reads_what_is_needed_and_no_more",
)


def suite_of(mutant: Mutant) -> Suite:
    if mutant in in_swap.MUTANTS:
        return SWAP
    if mutant in in_states.MUTANTS and not mutant.file.startswith("engine/"):
        return STATES
    return ENGINE.get(mutant.file, CONTROL_PLANE)


NO_REDIRECTION = """import sys
sys.meta_path[:] = [each for each in sys.meta_path if not type(each).__module__.startswith("_editable")]
"""
"""An editable installation finds the package before PYTHONPATH does."""


def copy_package(folder: Path) -> None:
    """The folders as the package ``octavo``, in front of the installed one."""
    (folder / "sitecustomize.py").write_text(NO_REDIRECTION)
    package = folder / "octavo"
    package.mkdir()
    (package / "__init__.py").write_text('"""A copy with a bug."""\n')
    for name in FOLDERS:
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__", "_ext*.so"))


def attempt(mutant: Mutant | None, suite: Suite) -> str | None:
    """Who caught it; None: nobody."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_package(folder)
        if mutant is not None:
            path = folder / "octavo" / mutant.file
            path.write_text(spoilt(mutant, path.read_text()))
        if mutant is None:
            check_is_imported(folder)
        return run_tests(suite, {"PYTHONPATH": str(folder), **native_extension()})


def check_is_imported(folder: Path) -> None:
    """SystemExit unless tests would import the copy: against the installed package every bug is missed."""
    command = [sys.executable, "-c", "import octavo.scheduler as found; print(found.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    if not Path(done.stdout.strip()).is_relative_to(folder):
        raise SystemExit(f"tests import {done.stdout.strip()} and not the copy in {folder}")


def native_extension() -> dict[str, str]:
    """Lets a copy of the kernels' folder take the extension that is installed, if one is."""
    found = importlib.util.find_spec("octavo.kernels._ext")
    return {} if found is None or found.origin is None else {"OCTAVO_TEST_EXTENSION": found.origin}


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    control = in_scheduler.MUTANTS + in_policies.MUTANTS + in_states.MUTANTS
    everything = control + in_swap.MUTANTS + in_engine.MUTANTS
    mutants = [mutant for mutant in everything if word in mutant.name]
    if lost := [mutant.name for mutant in mutants if not mutant.file]:
        raise SystemExit(f"no file has what these replace, or several have it: {lost}")
    suites = dict.fromkeys(map(suite_of, mutants))
    clean = [partial(attempt, None, suite) for suite in suites]
    return hunt(mutants, lambda mutant: attempt(mutant, suite_of(mutant)), clean=clean)


if __name__ == "__main__":
    sys.exit(main())
