"""Finds the compiler that builds kernels: clang 19 or newer, from the system or from PyPI's ziglang."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from metal_emulator.errors import NoMetalCompilerError

COMPILER_VARIABLE = "OCTAVO_METAL_CXX"
MIN_CLANG = 19  # the oldest version known to work; 16 lacks arithmetic on __bf16
_NEWEST_CLANG = 30
REMEDY = (
    "install one with `apt-get install -y clang-19` or `pip install ziglang`, "
    f"or name one in {COMPILER_VARIABLE}"
)


@dataclass(frozen=True)
class Compiler:
    """A command that takes clang's options; `version` is a part of every cache key."""

    command: tuple[str, ...]
    version: str

    @property
    def is_zig(self) -> bool:
        return "ziglang" in self.command

    @property
    def target_flags(self) -> tuple[str, ...]:
        """Return flags for a fixed CPU, so that several machines can share cached kernels."""
        if platform.machine() != "x86_64":
            return ()
        return ("-mcpu=x86_64_v3",) if self.is_zig else ("-march=x86-64-v3",)


@cache
def find_compiler() -> Compiler:
    """Return the compiler named in OCTAVO_METAL_CXX, or else the first that is new enough.

    Raises NoMetalCompilerError if there is none.
    """
    if sys.platform != "linux":
        raise NoMetalCompilerError(f"the Metal emulator runs on Linux, this is {sys.platform}")
    named = os.environ.get(COMPILER_VARIABLE)
    if named:
        version = _version(shlex.split(named))
        if version is None:
            raise NoMetalCompilerError(f"{COMPILER_VARIABLE}={named!r} does not run: {REMEDY}")
        return Compiler(tuple(shlex.split(named)), version)
    for command in _candidates():
        version = _version(command)
        if version is not None and _is_new_enough(version):
            return Compiler(tuple(command), version)
    raise NoMetalCompilerError(f"no clang of version {MIN_CLANG} or newer: {REMEDY}")


def why_unavailable() -> str | None:
    """Return why this machine cannot build kernels; None if it can."""
    try:
        find_compiler()
    except NoMetalCompilerError as error:
        return str(error)
    return None


def _candidates() -> Iterator[list[str]]:
    for name in (*(f"clang++-{n}" for n in range(MIN_CLANG, _NEWEST_CLANG)), "clang++"):
        path = shutil.which(name)
        if path is not None:
            yield [path]
    if importlib.util.find_spec("ziglang") is not None:
        yield [sys.executable, "-m", "ziglang", "c++"]


def _version(command: list[str]) -> str | None:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.splitlines()[0] if done.stdout else None


def _is_new_enough(version: str) -> bool:
    found = re.search(r"clang version (\d+)", version)
    return found is not None and int(found[1]) >= MIN_CLANG
