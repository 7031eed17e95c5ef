"""Plant bugs in the Python code, one at a time, and count the bugs that tests find.

    python tests/mutants/run.py [--each 4] [--seed 0] [WORD]

--each: number of bugs per file of SUITES; WORD: only files whose path contains it.
Runs the tests of the file on a copy of the package; some minutes per file. Prints a table.
Exit status 1 if the tests fail without a bug, or find fewer than ``SHARE`` of the bugs.
Some bugs change nothing, such as a limit plus one."""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from harness import hunt, run_tests
from mutant import FOLDERS, ROOT
from operators import Edit, edits

SHARE = 0.75
BLOCKS = (
    "tests/block_manager/test_block_manager.py",
    "tests/block_manager/test_window_groups.py",
    "tests/block_manager/test_residual_pages.py",
    "tests/block_manager/test_kv_group_spec.py",
    "tests/block_manager/test_machine.py",
    "tests/block_manager/test_prefix_oracle.py",
)
EVENTS = ("tests/block_manager/test_events.py", "tests/engine/grpc/octavo_v1/test_cache_watch.py")
STATES = (
    "tests/block_manager/test_recurrent_states.py",
    "tests/block_manager/test_snapshot_order.py",
    "tests/block_manager/test_state_machine.py",
    "tests/scheduler/test_serving.py",
)
SCHEDULER = ("tests/scheduler",)
SUITES: dict[str, tuple[str, ...]] = {
    "block_manager/digests.py": BLOCKS,
    "block_manager/manager.py": BLOCKS + STATES,
    "block_manager/page_pool.py": BLOCKS,
    "block_manager/kv_group.py": ("tests/block_manager/test_passed_pages.py", *BLOCKS),
    "block_manager/prefix_search.py": BLOCKS + STATES,
    "block_manager/snapshot_order.py": STATES,
    "block_manager/spec.py": BLOCKS,
    "block_manager/state_group.py": STATES,
    "block_manager/truncation.py": BLOCKS + STATES,
    "block_manager/events.py": EVENTS,
    "scheduler/admitter.py": SCHEDULER,
    "scheduler/budget.py": SCHEDULER,
    "scheduler/latency_target.py": SCHEDULER,
    "scheduler/preemption.py": SCHEDULER,
    "scheduler/resumption.py": SCHEDULER,
    "scheduler/scheduler.py": SCHEDULER,
    "scheduler/waiting/line.py": SCHEDULER,
    "scheduler/waiting/queue.py": SCHEDULER,
    "engine/core/overlap.py": ("tests/engine/core/test_overlap.py",),
    "engine/executor/batch.py": ("tests/engine/executor/test_batch.py",),
    "engine/executor/device_step.py": ("tests/engine/executor/test_steps_in_flight.py",),
    "engine/executor/sampling/device_sampling.py": (
        "tests/engine/executor/sampling/test_device_sampling.py",
    ),
    "engine/executor/recurrent/segments.py": (
        "tests/engine/executor/recurrent/test_speculation.py",
        "tests/engine/executor/recurrent/test_recurrent_models.py",
    ),
    "engine/executor/recurrent/state_pool.py": (
        "tests/kernels/test_state_segments.py",
        "tests/engine/executor/recurrent/test_recurrent_models.py",
    ),
    "engine/kv_store/host_memory.py": (
        "tests/scheduler/test_swap.py",
        "tests/engine/kv_store/test_windows.py",
    ),
    "engine/tokenizer/detokenizer.py": ("tests/engine/tokenizer",),
    "kernels/residual.py": ("tests/kernels/test_residual_attention.py",),
}
NO_REDIRECTION = """import sys
sys.meta_path[:] = [each for each in sys.meta_path if not type(each).__module__.startswith("_editable")]
"""
"""An editable installation comes before PYTHONPATH."""


def sample(file: str, count: int, seed: int) -> list[Edit]:
    made = edits(ROOT, file)
    return sorted(random.Random(f"{seed}:{file}").sample(made, min(count, len(made))))


def copy_package(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(NO_REDIRECTION)
    package = folder / "octavo"
    package.mkdir()
    (package / "__init__.py").write_text('"""A copy with a bug."""\n\n__version__ = "0"\n')
    (folder / "octavo_lab").symlink_to(ROOT / "lab")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__", "_ext*.so"))
    (package / "v1").symlink_to(package / "proto" / "octavo" / "v1")


def attempt(edit: Edit | None, suite: tuple[str, ...]) -> str | None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_package(folder)
        if edit is None:
            check_is_imported(folder)
        else:
            path = folder / "octavo" / edit.file
            path.write_text(edit.apply(path.read_text()))
        return run_tests(suite, {"PYTHONPATH": str(folder), **native_extension()})


def check_is_imported(folder: Path) -> None:
    """Raise SystemExit unless tests import the copy of the package."""
    command = [sys.executable, "-c", "import octavo.scheduler as found; print(found.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    if not Path(done.stdout.strip()).is_relative_to(folder):
        raise SystemExit(f"tests import {done.stdout.strip()} and not the copy in {folder}")


def native_extension() -> dict[str, str]:
    found = importlib.util.find_spec("octavo.kernels._ext")
    return {} if found is None or found.origin is None else {"TEST_EXTENSION": found.origin}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("word", nargs="?", default="", help="files with this in their path")
    parser.add_argument("--each", type=int, default=4, help="bugs of each file")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    files = [file for file in SUITES if args.word in file]
    bugs = [edit for file in files for edit in sample(file, args.each, args.seed)]
    clean = [partial(attempt, None, suite) for suite in dict.fromkeys(SUITES[file] for file in files)]
    return hunt(bugs, lambda edit: attempt(edit, SUITES[edit.file]), clean=clean, share=SHARE)


if __name__ == "__main__":
    sys.exit(main())
