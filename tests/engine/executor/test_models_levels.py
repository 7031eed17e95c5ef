from __future__ import annotations

from pathlib import Path

import pytest

from native import at_every_level, require_extension, run_at_level

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


@pytest.mark.slow
@at_every_level
def test_every_architecture_and_window_at_other_levels(level: str) -> None:
    if level == _ext.isa():
        pytest.skip("these tests have run at this CPU's level")
    files = [str(FOLDER / name) for name in ("test_models.py", "test_models_windows.py")]
    printed = run_tests(level, *files, "-m", "not slow", "-k", "cpu or windows")
    assert f"ran at {level}" in printed
    assert " passed" in printed
