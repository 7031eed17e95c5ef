"""Do the tests of the control plane earn their keep? Seed bugs, one at a time, and count catches.

``python tests/mutants/run.py [WORD]`` copies block_manager and scheduler to a scratch folder,
plants each bug of in_*.py (with WORD: those that have it in the name) there and runs the tests
against it. Prints a table; exits 1 if the tests miss a bug, or fail without one. Some minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import in_block_manager
import in_scheduler
from mutant import Mutant
from tqdm import tqdm

MUTANTS = in_block_manager.MUTANTS + in_scheduler.MUTANTS
ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/unit/test_block_manager.py",
    "tests/unit/test_window_groups.py",
    "tests/unit/test_mixed_pages.py",
    "tests/unit/test_events.py",
    "tests/unit/test_scheduler.py",
    "tests/unit/test_prefix_in_flight.py",
    "tests/unit/test_scheduler_siblings.py",
    "tests/property/test_block_manager.py",
    "tests/property/test_prefix_oracle.py",
    "tests/property/test_serving.py",
)
TIMEOUT_S = 300


def run_tests(package: Path) -> str | None:
    """The first failing test, or None if all pass. A bug that hangs is caught by the clock."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *TESTS]
    environment = {**os.environ, "PYTHONPATH": str(package), "OCTAVO_HYPOTHESIS": "mutants"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not failed:
        raise RuntimeError(f"pytest did not run:\n{done.stdout}{done.stderr}")
    return failed[0].split(" - ")[0].rpartition("/")[2]


def copy_package(folder: Path) -> None:
    """The two rooms as the package ``octavo``, in front of the installed one."""
    package = folder / "octavo"
    package.mkdir()
    (package / "__init__.py").write_text('"""A copy with a bug."""\n')
    for room in ("block_manager", "scheduler"):
        shutil.copytree(ROOT / room, package / room, ignore=shutil.ignore_patterns("__pycache__"))


def plant(mutant: Mutant, folder: Path) -> None:
    path = folder / "octavo" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.file} has {text.count(mutant.old)} times {mutant.old!r}")
    path.write_text(text.replace(mutant.old, mutant.new))


def attempt(mutant: Mutant | None) -> tuple[str | None, float]:
    """Who caught it (None: nobody), and after how many seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_package(folder)
        if mutant is not None:
            plant(mutant, folder)
        began = time.monotonic()
        return run_tests(folder), time.monotonic() - began


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    mutants = [mutant for mutant in MUTANTS if word in mutant.name]
    caught_by, _ = attempt(None)
    if caught_by is not None:
        print(f"the tests fail without any bug: {caught_by}")
        return 1
    missed = 0
    for mutant in tqdm(mutants, unit="bug", disable=None):
        caught_by, seconds = attempt(mutant)
        missed += caught_by is None
        tqdm.write(f"{mutant.name:46}  {seconds:5.1f} s  {caught_by or 'MISSED'}")
    print(f"{len(mutants) - missed} of {len(mutants)} bugs caught")
    return 1 if missed or not mutants else 0


if __name__ == "__main__":
    sys.exit(main())
