"""The wheel, built without a compiler, so that it takes only seconds."""

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
    assert wheel.stat().st_size < 20_000_000
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "octavo/__init__.py",
        "octavo/py.typed",
        "octavo/block_manager/__init__.py",
        "octavo/scheduler/__init__.py",
        "octavo/kernels/__init__.py",
        "octavo/engine/cli/__init__.py",
        "octavo/engine/demo/model.safetensors",
        "octavo/engine/demo/tokenizer.json",
        "octavo/engine/demo_hybrid/model.safetensors",
        "octavo/engine/demo_hybrid/tokenizer.json",
        "octavo/engine/executor/native/modules.py",
        "octavo/v1/cache_pb2.py",
        "octavo/v1/generation_pb2.py",
    } <= names
    assert any(name.endswith("generation.proto") for name in names)
    assert not [name for name in names if not name.startswith(("octavo/", "octavo-"))]
    assert not [name for name in names if "csrc" in name or name.endswith((".cpp", ".h", ".so"))]
