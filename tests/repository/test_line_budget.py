"""How many lines each package may have, of Python and of C++: what grows makes room, or says why here."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUDGETS = {
    "block_manager": 3_700,
    "engine": 900,  # what has no budget of its own below
    "engine/api": 2_215,
    "engine/arguments": 850,
    "engine/chat": 2_050,
    "engine/cli": 1_850,
    "engine/client": 700,
    "engine/core": 3_460,
    "engine/executor": 11_700,
    "engine/frontend": 1_900,
    "engine/gguf": 820,
    "engine/grpc": 3_705,
    "engine/http": 4_275,
    "engine/inspection": 500,
    "engine/kv_events": 230,
    "engine/kv_store": 2_050,
    "engine/memory": 1_300,
    "engine/observability": 1_050,
    "engine/speculation": 1_600,
    "engine/structured_output": 2_450,
    "engine/tokenizer": 1_000,
    "engine/vision": 350,
    "kernels": 7_900,
    "kernels/csrc": 100,  # module.cpp
    "kernels/csrc/attention": 6_605,
    "kernels/csrc/linear": 6_285,
    "kernels/csrc/ops": 1_335,
    "kernels/csrc/pages": 1_330,
    "kernels/csrc/program": 1_060,
    "kernels/csrc/recurrent": 1_695,
    "kernels/csrc/runtime": 1_225,
    "kernels/csrc/sampling": 1_120,
    "lab": 100,
    "lab/architectures": 600,
    "lab/bench": 4_250,
    "lab/cache_sim": 650,
    "lab/commands": 300,
    "lab/kernels": 400,
    "lab/plots": 300,
    "lab/policies": 450,
    "scheduler": 3_400,
    "tests": 66_600,
    "tools": 6_350,
}


def package_of(file: str) -> str:
    parts = file.split("/")
    folders = ["/".join(parts[:depth]) for depth in (3, 2, 1)]
    return next((folder for folder in folders if folder in BUDGETS), parts[0])


def lines_by_package() -> Counter[str]:
    patterns = ["*.py", "kernels/csrc/*.h", "kernels/csrc/*.cpp"]
    git = ["git", "ls-files", *patterns]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True)
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


def test_files_are_counted_by_folder() -> None:
    assert package_of("engine/core/build.py") == package_of("engine/core/x/y.py") == "engine/core"
    assert package_of("engine/__init__.py") == package_of("engine/of_tomorrow/a.py") == "engine"
    assert package_of("kernels/csrc/ops/rope.cpp") == "kernels/csrc/ops"
    assert package_of("kernels/csrc/module.cpp") == "kernels/csrc"
    assert package_of("scheduler/waiting/fair.py") == "scheduler"
