"""Running a piece of a test at every instruction set of this CPU: the extension chooses one per process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEVELS = ("generic", "avx2", "avx512", "amx")


def require_extension() -> None:
    """Skip the calling module, saying why, where the native extension is not built."""
    pytest.importorskip(
        "octavo.kernels._ext", reason="the native extension is not built", exc_type=ImportError
    )


def run_at_level(level: str, code: str) -> str:
    """What Python ``code`` prints at the level; skips the test where the CPU lacks it."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OCTAVO_CPU_ISA": level, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if done.returncode and f"OCTAVO_CPU_ISA={level} is not supported by this CPU" in done.stderr:
        pytest.skip(f"this CPU lacks {level}")
    assert done.returncode == 0, done.stderr
    return done.stdout
