"""Bugs that someone could have written, one small edit each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """Replace ``old``, which occurs once in ``file``, by ``new``."""

    name: str
    file: str
    old: str
    new: str
