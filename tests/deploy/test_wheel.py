"""Contents of an installation where nothing can be compiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_wheel_without_a_compiler_is_pure_python(tmp_path: Path) -> None:
    if importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("scikit-build-core is not installed here")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "-w", str(tmp_path), str(ROOT), "-C", f"build-dir={tmp_path / 'build'}"],
        env=os.environ | {"CXX": str(tmp_path / "no-such-compiler")},
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "octavo/py.typed" in names
    assert "octavo/engine/executor/native/modules.py" in names
    assert any(name.endswith("generation.proto") for name in names)
    assert any(name.startswith("octavo/engine/demo/") and name.endswith(".safetensors") for name in names)
    assert not [name for name in names if "csrc" in name or name.endswith(".so")]
