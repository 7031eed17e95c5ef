"""Seeded bugs must go on fitting the sources: what has moved away is never planted, and nobody notices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "mutants"))

import extension
import in_engine
import in_metal
import in_native
import in_policies
import in_scheduler
import in_states
import in_swap
import run
from harness import spoilt
from mutant import ROOT, Mutant

from octavo.kernels.metal.units import read_source

PYTHON = (
    *in_scheduler.MUTANTS,
    *in_policies.MUTANTS,
    *in_states.MUTANTS,
    *in_swap.MUTANTS,
    *in_engine.MUTANTS,
)


def name_of(mutant: Mutant) -> str:
    return mutant.name


def suite_of(mutant: Mutant) -> tuple[str, ...]:
    return extension.TESTS.get(mutant.name) or tuple(run.suite_of(mutant))


@pytest.mark.parametrize("mutant", [*PYTHON, *in_native.MUTANTS], ids=name_of)
def test_bugs_fit(mutant: Mutant) -> None:
    assert mutant.file, f"no file has {mutant.old!r}, or several have it"
    source = (ROOT / mutant.file).read_text()
    assert spoilt(mutant, source) != source
    assert all((ROOT / test.partition("::")[0]).exists() for test in suite_of(mutant))


def test_suites_are_of_files_that_there_are() -> None:
    assert all((ROOT / file).exists() for file in run.ENGINE)


@pytest.mark.parametrize("mutant", in_metal.MUTANTS, ids=name_of)
def test_bugs_in_metal_kernels_fit(mutant: Mutant) -> None:
    source = "\n".join(read_source(mutant.file))
    assert spoilt(mutant, source) != source


@pytest.mark.parametrize("mutants", [PYTHON, in_native.MUTANTS, in_metal.MUTANTS])
def test_a_bug_has_a_name_of_its_own(mutants: tuple[Mutant, ...]) -> None:
    assert len({mutant.name for mutant in mutants}) == len(mutants)
