"""Each planted bug must match its source; otherwise it would never be planted."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "mutants"))

import extension
import in_metal
import in_native
import operators
import run
from harness import spoilt
from mutant import ROOT, Mutant

from octavo.kernels.metal.units import read_source


def name_of(mutant: Mutant) -> str:
    return mutant.name


@pytest.mark.parametrize("mutant", in_native.MUTANTS, ids=name_of)
def test_bugs_in_native_kernels_fit(mutant: Mutant) -> None:
    assert mutant.file, f"no file has {mutant.old!r}, or several have it"
    source = (ROOT / mutant.file).read_text()
    assert spoilt(mutant, source) != source
    for test in extension.TESTS[mutant.name]:
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text(), test


@pytest.mark.parametrize("file", run.SUITES)
def test_bugs_of_every_kind_are_python(file: str) -> None:
    source, made = (ROOT / file).read_text(), operators.edits(ROOT, file)
    assert made
    for edit in run.sample(file, 10, seed=1):
        assert edit.apply(source) != source
        ast.parse(edit.apply(source))
    assert all((ROOT / test).exists() for test in run.SUITES[file] if test.startswith("tests/"))


def test_each_operator_makes_the_bugs_that_it_says(tmp_path: Path) -> None:
    lines = (
        "def f(a, b):", "    assert a < 5", "    if a <= b and not b:", "        self.x = min(a, 7) + 1",
        "        g(a)", "    log.info(3)", "    raise ValueError(a + 1)",
    )  # fmt: skip
    (tmp_path / "a.py").write_text("\n".join(lines))
    made = {(edit.old, edit.new) for edit in operators.edits(tmp_path, "a.py")}
    assert made == {
        ("a <= b", "(a < b)"),
        ("a <= b and not b", "(a <= b or not b)"),
        ("not b", "(b)"),
        ("self.x = min(a, 7) + 1", "pass"),
        ("min(a, 7) + 1", "(min(a, 7) - 1)"),
        ("min", "max"),
        ("7", "8"),
        ("1", "2"),
        ("g(a)", "pass"),
        ("3", "4"),
    }


@pytest.mark.parametrize("mutant", in_metal.MUTANTS, ids=name_of)
def test_bugs_in_metal_kernels_fit(mutant: Mutant) -> None:
    source = "\n".join(read_source(mutant.file))
    assert spoilt(mutant, source) != source


@pytest.mark.parametrize("mutants", [in_native.MUTANTS, in_metal.MUTANTS])
def test_a_bug_has_a_name_of_its_own(mutants: tuple[Mutant, ...]) -> None:
    assert len({mutant.name for mutant in mutants}) == len(mutants)
