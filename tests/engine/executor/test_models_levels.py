"""The tests of models at every instruction set: those that this CPU runs, and the others emulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from native import at_every_level, require_extension, run_at_level

pytestmark = pytest.mark.parity

require_extension()

FOLDER = Path(__file__).resolve().parent
# Sockets, files and caches of the outer run are not the inner one's.
RUN = """
import pytest, sys
from octavo.kernels import _ext
code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", *{arguments!r}])
print("ran at", _ext.isa())
sys.exit(code)
"""


def run_tests(level: str, *arguments: str) -> str:
    """What pytest prints of the tests that ``arguments`` name, at a level; all pass."""
    return run_at_level(level, RUN.format(arguments=list(arguments)), limit=800)


@at_every_level
def test_models_are_mlx_lms_own_at_every_level(level: str) -> None:
    """Every architecture in 16 bits, one in 32 and from int8 pages, greedily served by the native backend.
    The slow run has all of them."""
    chosen = ["-k", "greedy_serving and cpu and (bfloat16 or llama)"]
    printed = run_tests(level, str(FOLDER / "test_models.py"), *chosen)
    assert f"ran at {level}" in printed
    assert " passed" in printed


@pytest.mark.slow
@at_every_level
def test_every_test_of_models_passes_at_every_level(level: str) -> None:
    files = sorted(str(file) for file in FOLDER.glob("test_models*.py") if file.name != Path(__file__).name)
    printed = run_tests(level, *files)
    assert f"ran at {level}" in printed
    assert " passed" in printed
