from __future__ import annotations

from pathlib import Path

import pytest

import tiny_models
from native import LEVELS, at_every_level, require_extension, run_at_level

pytestmark = pytest.mark.parity

_ext = require_extension()

FOLDER = Path(__file__).resolve().parent
# The inner run must not use the sockets, files and caches of the outer run.
RUN = """
import pytest, sys
from octavo.kernels import _ext
code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", *{arguments!r}])
print("ran at", _ext.isa())
sys.exit(code)
"""


def run_tests(level: str, *arguments: str) -> str:
    return run_at_level(level, RUN.format(arguments=list(arguments)), limit=800)


@at_every_level
def test_models_are_mlx_lms_own_at_every_level(level: str) -> None:
    quarter = list(tiny_models.CONFIGS)[LEVELS.index(level) :: len(LEVELS)]
    chosen = [f"{name}-bfloat16-bf16" for name in quarter] + ["llama-float32-fp16", "llama-float32-int8"]
    test = f"{FOLDER / 'test_models.py'}::test_greedy_serving_is_mlx_lms_own"
    printed = run_tests(level, *(f"{test}[{case}-cpu]" for case in chosen))
    assert f"ran at {level}" in printed
    assert f"{len(chosen)} passed" in printed


@pytest.mark.slow
@at_every_level
def test_every_architecture_and_window_at_other_levels(level: str) -> None:
    if level == _ext.isa():
        pytest.skip("these tests have run at this CPU's level")
    files = [str(FOLDER / name) for name in ("test_models.py", "test_models_windows.py")]
    printed = run_tests(level, *files, "-m", "not slow", "-k", "cpu or windows")
    assert f"ran at {level}" in printed
    assert " passed" in printed
