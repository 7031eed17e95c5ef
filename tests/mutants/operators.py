"""Bugs in Python, made by an operator at each place where it applies.

compare    ``<`` for ``<=``, ``==`` for ``!=``, ``is`` for ``is not``, ``in`` for ``not in``, and back
calculate  ``+`` for ``-``, ``*`` for ``//``, and back
combine    ``and`` for ``or``, and back
negate     a condition is inverted
count      an integer is one larger
choose     ``min`` for ``max``, ``any`` for ``all``, and back
omit       a call without a result, or an assignment to an attribute, is removed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
CALCULATE: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
}  # fmt: skip
CHOOSE = {"min": "max", "max": "min", "any": "all", "all": "any"}
UNTESTED = ("log", "warnings")


class Edit(NamedTuple):
    """Bytes [start, stop) of a file become ``new``."""

    file: str
    line: int
    start: int
    stop: int
    old: str
    new: str

    @property
    def name(self) -> str:
        short = " ".join(self.old.split()), " ".join(self.new.split())
        return f"{self.file}:{self.line} {short[0]:.40} -> {short[1]:.40}"

    def apply(self, text: str) -> str:
        data = text.encode()
        return (data[: self.start] + self.new.encode() + data[self.stop :]).decode()


def edits(root: Path, file: str) -> list[Edit]:
    text = (root / file).read_text()
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found = []
    for node, new in _changed(ast.parse(text)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, stop = (
            lines[node.lineno - 1] + node.col_offset,
            lines[node.end_lineno - 1] + node.end_col_offset,
        )
        old = text.encode()[start:stop].decode()
        found.append(Edit(file, node.lineno, start, stop, old, new))
    return sorted(set(found))


def _changed(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                for node in _executed(statement):
                    for change in OPERATORS:
                        if (new := change(node)) is not None:
                            assert isinstance(node, ast.expr | ast.stmt)
                            yield node, new


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    if isinstance(node, ast.AnnAssign):
        if node.value is not None:
            yield from _executed(node.value)
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _executed(child)


def _compare(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Compare) or type(node.ops[0]) not in COMPARE:
        return None
    return _wrapped(ast.Compare(node.left, [COMPARE[type(node.ops[0])](), *node.ops[1:]], node.comparators))


def _calculate(node: ast.AST) -> str | None:
    if not isinstance(node, ast.BinOp) or type(node.op) not in CALCULATE:
        return None
    return _wrapped(ast.BinOp(node.left, CALCULATE[type(node.op)](), node.right))


def _combine(node: ast.AST) -> str | None:
    if not isinstance(node, ast.BoolOp):
        return None
    return _wrapped(ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))


def _negate(node: ast.AST) -> str | None:
    return _wrapped(node.operand) if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else None


def _count(node: ast.AST) -> str | None:
    return str(node.value + 1) if isinstance(node, ast.Constant) and type(node.value) is int else None


def _choose(node: ast.AST) -> str | None:
    return CHOOSE.get(node.id) if isinstance(node, ast.Name) else None


def _omit(node: ast.AST) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return None if ast.unparse(node.value.func).split(".")[0] in UNTESTED else "pass"
    of_object = isinstance(node, ast.Assign) and all(isinstance(each, ast.Attribute) for each in node.targets)
    return "pass" if of_object else None


def _wrapped(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


OPERATORS: tuple[Callable[[ast.AST], str | None], ...] = (
    _compare, _calculate, _combine, _negate, _count, _choose, _omit,
)  # fmt: skip
