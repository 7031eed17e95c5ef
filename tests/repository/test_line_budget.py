"""How many lines of Python each package may have: what grows past its budget makes room, or says why here."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIVIDED = ("engine", "lab", "tests")  # whose folders have budgets of their own
BUDGETS = {
    "block_manager": 3_900,
    "engine/api": 2_050,
    "engine/arguments": 800,
    "engine/chat": 1_950,
    "engine/cli": 1_850,
    "engine/client": 650,
    "engine/core": 3_350,
    "engine/executor": 10_900,
    "engine/frontend": 1_850,
    "engine/grpc": 3_550,
    "engine/http": 3_950,
    "engine/inspection": 500,
    "engine/kv_store": 2_150,
    "engine/memory": 1_350,
    "engine/observability": 1_050,
    "engine/speculation": 1_050,
    "engine/structured_output": 2_350,
    "engine/tokenizer": 950,
    "kernels": 8_450,
    "lab/architectures": 650,
    "lab/bench": 4_500,
    "lab/cache_sim": 650,
    "lab/commands": 300,
    "lab/kernels": 400,
    "lab/plots": 300,
    "lab/policies": 450,
    "scheduler": 3_550,
    "tests/bench": 3_300,
    "tests/block_manager": 3_200,
    "tests/chaos": 2_200,
    "tests/deploy": 950,
    "tests/engine": 28_200,
    "tests/kernels": 6_900,
    "tests/lab": 1_850,
    "tests/mutants": 1_750,
    "tests/proto": 300,
    "tests/repository": 1_300,
    "tests/scheduler": 4_150,
    "tests/support": 8_100,
    "tests/tools": 1_750,
    "tools": 6_250,
}


def package_of(file: str) -> str:
    parts = file.split("/")
    return "/".join(parts[:2]) if parts[0] in DIVIDED and len(parts) > 2 else parts[0]


def lines_by_package() -> Counter[str]:
    done = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines: Counter[str] = Counter()
    for file in done.stdout.splitlines():
        if "_pb2" not in file and (ROOT / file).is_file():
            lines[package_of(file)] += len((ROOT / file).read_text().splitlines())
    return lines


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout: nothing to ask git about")
def test_no_package_has_more_lines_than_its_budget() -> None:
    lines = lines_by_package()
    over = {name: (lines[name], most) for name, most in BUDGETS.items() if lines[name] > most}
    assert not over, f"lines must be at most the budget, got {over}; delete something, or raise it here"
    folders = {name for name in lines if name.split("/")[0] in DIVIDED and "/" in name}
    assert folders <= BUDGETS.keys(), f"give these a budget: {sorted(folders - BUDGETS.keys())}"


def test_files_are_counted_by_folder() -> None:
    assert package_of("engine/core/build.py") == package_of("engine/core/x/y.py") == "engine/core"
    assert package_of("engine/__init__.py") == "engine"
    assert package_of("scheduler/waiting/fair.py") == "scheduler"
