from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from mutant import ROOT, Mutant
from tqdm import tqdm

TIMEOUT_S = 600
TEST_TIMEOUT_S = 120


class Bug(Protocol):
    @property
    def name(self) -> str: ...


BugT = TypeVar("BugT", bound=Bug)


def run_tests(tests: Sequence[str], environment: dict[str, str]) -> str | None:
    """Return the first failing test, or None. A timeout or a crash counts as a failure."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    clock = ["--timeout=0", "-o", f"faulthandler_timeout={TEST_TIMEOUT_S}"]
    command = [*pytest, *clock, "-m", "not slow", *tests]
    variables = {**os.environ, "HYPOTHESIS_PROFILE": "mutants", **environment}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"the process died of signal {-done.returncode}"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not failed and "Timeout (" in done.stderr:  # a hanging test ended the process
        return f"no end of a test within {TEST_TIMEOUT_S} s"
    if not failed:
        raise RuntimeError(f"pytest did not run:\n{done.stdout}{done.stderr}")
    return failed[0].split(" - ")[0].rpartition("/")[2]


def spoilt(mutant: Mutant, text: str) -> str:
    """Return the text with the bug. Raises SystemExit unless ``old`` occurs once."""
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.file} has {text.count(mutant.old)} times {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def hunt(
    mutants: Sequence[BugT],
    attempt: Callable[[BugT], str | None],
    *,
    clean: Sequence[Callable[[], str | None]],
    share: float = 1.0,
) -> int:
    """Print which test caught each bug; return 0 if at least ``share`` of the bugs were caught."""
    for check in clean:
        if (caught_by := check()) is not None:
            print(f"the tests fail without any bug: {caught_by}")
            return 1
    missed = 0
    for mutant in tqdm(mutants, unit="bug", disable=None):
        began = time.monotonic()
        caught_by = attempt(mutant)
        missed += caught_by is None
        tqdm.write(f"{mutant.name:100}  {time.monotonic() - began:5.1f} s  {caught_by or 'MISSED'}")
    print(f"{len(mutants) - missed} of {len(mutants)} bugs caught")
    return 0 if mutants and len(mutants) - missed >= share * len(mutants) else 1
