from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import sys, {module}
heavy = {{"mlx", "numpy", "mlx_lm", "grpc"}} & set(sys.modules)
assert not heavy, f"{module} imports {{heavy}}"
"""


@pytest.mark.parametrize("module", ["octavo.block_manager", "octavo.scheduler"])
def test_the_control_plane_imports_no_arrays(module: str) -> None:
    probe = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)], capture_output=True, text=True, check=False
    )
    assert probe.returncode == 0, probe.stderr


def test_the_block_manager_does_not_know_the_scheduler() -> None:
    probe = "import sys, octavo.block_manager; assert 'octavo.scheduler' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
