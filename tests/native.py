"""The native extension for tests, at every instruction set this machine can run."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

LEVELS = ("generic", "avx2", "avx512", "amx")
_TESTS = Path(__file__).resolve().parent


def require_extension() -> ModuleType:
    """The extension, or an explicit skip that says why there is none."""
    try:
        from octavo.kernels import _ext
    except ImportError as error:
        pytest.skip(f"the native CPU extension does not load: {error}", allow_module_level=True)
    return _ext


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter that finds the helpers of the tests."""
    paths = [str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False, timeout=110
    )


@functools.cache
def available_levels() -> tuple[str, ...]:
    """The levels this CPU runs, lowest first; each is asked for once, in a process of its own."""
    code = "from octavo.kernels import _ext; print(_ext.isa())"
    found = (run_python(code, OCTAVO_CPU_ISA=level).stdout.strip() for level in LEVELS)
    return tuple(level for level, answer in zip(LEVELS, found, strict=True) if answer == level)
