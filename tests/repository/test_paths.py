"""A request calls the functions that ARCHITECTURE.md lists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTION = re.compile(r"^### Function by function\n(.*?)^```\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
STEP = re.compile(r"^(?:\w+(?: \w+)*)? +(\S+\.py) +([\w.]+)$")
PATHS = {"token": 0, "page": 1}


def path_of(text: str, name: str) -> tuple[str, list[tuple[str, str]]]:
    prose, listed = SECTION.findall(text)[PATHS[name]]
    steps = [STEP.match(line) for line in listed.splitlines()]
    assert all(steps), f"a line of the path of a {name} names no function: {listed}"
    return prose, [(step[1], step[2]) for step in steps if step]


def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {node.name for node in tree.body if isinstance(node, kinds)}
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            found |= {f"{owner.name}.{node.name}" for node in owner.body if isinstance(node, kinds)}
    return found


@pytest.mark.parametrize("name", PATHS)
def test_functions_of_documented_paths_exist(name: str) -> None:
    prose, steps = path_of((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), name)
    missing = [f"{file}: {function}" for file, function in steps if function not in functions_of(file)]
    assert not missing, missing
    assert len(set(steps)) == len(steps), "a function is named twice"
    assert f"{len(steps)} functions in {len({file for file, _ in steps})} files" in " ".join(prose.split())
