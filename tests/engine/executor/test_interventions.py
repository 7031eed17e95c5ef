from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "engine" / "executor" / "README.md"
SOURCES = ("engine/executor", "kernels")
CHANGES = {"adapt_module", "overridden", "override_call", "rebind", "replaced", "setattr"}
FOREIGN = {"mlx", "mlx_lm", "resource", "sys", "builtins"}


def interventions(tree: ast.AST) -> Iterator[ast.AST]:
    imported = {"module", *_imported(tree)}
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.AnnAssign | ast.Assign) else None
        owner = value.value if isinstance(value, ast.Attribute) else None
        if isinstance(owner, ast.Name) and owner.id in imported - {"module"}:
            assert isinstance(node, ast.AnnAssign | ast.Assign)
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            imported |= {target.id} if isinstance(target, ast.Name) else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CHANGES:
            if not (isinstance(node.args[0], ast.Name) and node.args[0].id == "self"):
                yield node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                targets = target.elts if isinstance(target, ast.Tuple) else [target]
                yield from (each for each in targets if _is_foreign(each, imported))


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in FOREIGN:
                    yield alias.asname or alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            ours = node.module.rpartition(".")[2] == "mlx_lm_import"
            if ours or (not node.level and node.module.split(".")[0] in FOREIGN):
                yield from (alias.asname or alias.name for alias in node.names)


def _is_foreign(target: ast.expr, imported: set[str]) -> bool:
    if isinstance(target, ast.Subscript):
        text = ast.unparse(target.value)
        return text == "sys.modules" or text.startswith("vars(")
    if not isinstance(target, ast.Attribute):
        return False
    owner = target.value
    return target.attr == "__class__" or (isinstance(owner, ast.Name) and owner.id in imported)


def changing_files() -> set[str]:
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    return {
        path.relative_to(ROOT / "engine/executor").as_posix()
        if path.is_relative_to(ROOT / "engine/executor")
        else path.relative_to(ROOT).as_posix()
        for path in paths
        if any(interventions(ast.parse(path.read_text())))
    }


def test_the_table_names_every_file_that_changes_something_of_others() -> None:
    rows = re.findall(r"^\| \[`([\w/.]+)`\]\(([\w/.]+)\)", TABLE.read_text(), flags=re.MULTILINE)
    assert all(name == target for name, target in rows)
    assert changing_files() == {name for name, _ in rows}


@pytest.mark.parametrize(
    "line",
    [
        "import mlx.core as mx\nmx.load = None",
        "from mlx.nn import Linear\nLinear.__call__ = None",
        "def f(module):\n    module.__class__ = int",
        "def f(owner):\n    setattr(owner, 'x', None)",
        "def f(owner):\n    return replaced((owner, 'x', None))",
        "import sys\nsys.modules['mlx_lm'] = None",
        "vars(object)['x'] = None",
        "from ..mlx_lm_import import base\nkind = base.Args\nkind.from_dict = None",
        "for module in (1, 2):\n    module.scale = 1",
    ],
)
def test_changes_of_every_form_are_seen(line: str) -> None:
    assert any(interventions(ast.parse(line)))


def test_own_changes_are_no_interventions() -> None:
    own = "import mlx.core as mx\ndef f(self):\n    self.x = mx.zeros(1)\n    setattr(self, 'y', 1)"
    assert not any(interventions(ast.parse(own)))
