from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = (".py", ".cpp", ".h")
FOLDERS = ("block_manager", "scheduler", "kernels", "engine", "proto")


@dataclass(frozen=True)
class Mutant:
    """A bug: ``new`` replaces ``old``, which occurs once in ``file``."""

    name: str
    file: str
    old: str
    new: str


def bug(name: str, old: str, new: str) -> Mutant:
    """Return a bug in the Python or C++ file that contains ``old``."""
    files = [file for file, text in _sources().items() if old in text]
    return Mutant(name, files[0] if len(files) == 1 else "", old, new)


@functools.cache
def _sources() -> dict[str, str]:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
