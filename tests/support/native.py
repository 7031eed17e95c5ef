"""The native extension for tests, at each instruction set, native or emulated."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import x86_emulator

LEVELS = ("generic", "avx2", "avx512", "amx")
_SUPPORT = Path(__file__).resolve().parent
_HELPERS = (str(_SUPPORT), str(_SUPPORT.parents[1] / "tools"))

EXTENSION_VARIABLE = "TEST_EXTENSION"
"""File of an extension to test instead of the installed one (tools/sanitize.sh)."""

# Loaded by its file, because an editable installation finds another ``_ext``.
_LOAD = """
import importlib.util, sys
import mlx.core  # it loads libmlx, wherever that lies
import octavo.kernels
spec = importlib.util.spec_from_file_location("octavo.kernels._ext", {path!r})
octavo.kernels._ext = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(octavo.kernels._ext)
"""

FLAGS = {"generic": "", "avx2": "avx2", "avx512": "avx512_bf16", "amx": "amx_bf16"}


def _marks(level: str) -> list[pytest.MarkDecorator]:
    """Slow: an emulated level, whose first test builds kernels for minutes, and a level below AVX2."""
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text() if cpu.exists() else ""
    is_slow = bool(flags) and (FLAGS[level] not in flags or (level == "generic" and FLAGS["avx2"] in flags))
    seconds = 3600 if os.environ.get(EXTENSION_VARIABLE) else 900  # checked code is many times slower
    return [pytest.mark.timeout(seconds), *([pytest.mark.slow] if is_slow else [])]


def at_levels(*levels: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("level", [pytest.param(each, marks=_marks(each)) for each in levels])


at_every_level = at_levels(*LEVELS)


def load_extension() -> None:
    if built := os.environ.get(EXTENSION_VARIABLE):
        exec(_LOAD.format(path=built), {})


def require_extension() -> ModuleType:
    """Return the extension, or skip with the reason why there is none."""
    try:
        import mlx.core  # noqa: F401 loads libmlx

        from octavo.kernels import _ext
    except ImportError as error:
        pytest.skip(f"the native CPU extension does not load: {error}", allow_module_level=True)
    return _ext


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter with the test helpers and the same extension."""
    return _run_python(code, environment, limit=300)


def _run_python(code: str, environment: dict[str, str], *, limit: int) -> subprocess.CompletedProcess[str]:
    if built := os.environ.get(EXTENSION_VARIABLE):
        code = _LOAD.format(path=built) + code
    paths = [*_HELPERS, *filter(None, [os.environ.get("PYTHONPATH")])]
    limit = max(limit, 3600) if built else limit
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    return subprocess.run(
        [sys.executable, "-c", code],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit,
    )


def run_at_level(level: str, code: str, *, limit: int = 300) -> str:
    """Return the output of ``code`` in a new interpreter with kernels of the level.

    A level that this CPU lacks is emulated; the test is skipped where that cannot be built."""
    if level not in available_levels():
        if tested := os.environ.get(EXTENSION_VARIABLE):
            pytest.skip(f"this CPU does not run {level}, and {tested} is not what would be emulated")
        reason = x86_emulator.why_unavailable() if "avx2" in available_levels() else "that takes AVX2"
        if reason is not None:
            pytest.skip(f"this CPU does not run {level}, and it cannot be emulated: {reason}")
        folder = x86_emulator.extension(only_amx="avx512" in available_levels())
        (built,) = folder.glob("_ext*.so")
        code = _LOAD.format(path=str(built)) + code
    done = _run_python(code, {"OCTAVO_CPU_ISA": level}, limit=limit)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return done.stdout


@functools.cache
def available_levels() -> tuple[str, ...]:
    code = "import mlx.core; from octavo.kernels import _ext; print(_ext.isa())"
    asked = {level: run_python(code, OCTAVO_CPU_ISA=level) for level in LEVELS}
    # Every CPU runs this level; without this check, a broken build would skip all tests of levels.
    assert asked["generic"].returncode == 0, asked["generic"].stderr
    return tuple(level for level, done in asked.items() if done.stdout.strip() == level)
