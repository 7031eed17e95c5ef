"""Who may import what: the control plane runs without MLX, and nobody imports a bare room."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("block_manager", "engine", "kernels", "proto", "scheduler")
LIGHT = (
    "octavo.block_manager",
    "octavo.scheduler",
    "octavo.engine",
    "octavo.engine.api.config",
    "octavo.engine.executor.batch",
    "octavo.engine.frontend.async_engine",
    "octavo.engine.grpc",
    "octavo.engine.client.client",
    "octavo.engine.observability.prometheus",
    "octavo.engine.cli",
    "octavo.kernels.metadata",
    "octavo.kernels.formats",
)
BELOW = {  # room: the rooms it may import
    "block_manager": set(),
    "scheduler": {"block_manager"},
    "kernels": set(),
    "engine": {"block_manager", "scheduler", "kernels", "proto", "v1"},
    "proto": {"v1"},
}


def python_files(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in files if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))]


def imported(path: Path) -> set[str]:
    """Absolute names imported anywhere in a file, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("module", LIGHT)
def test_importing_the_control_plane_leaves_mlx_out(module: str) -> None:
    code = (
        f"import sys, {module}; print(','.join(m for m in ('mlx', 'mlx.core', 'mlx_lm') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "", f"importing {module} imports {done.stdout.strip()}"


@pytest.mark.parametrize("room", ["block_manager", "scheduler"])
def test_the_pure_rooms_use_the_standard_library_alone(room: str) -> None:
    for path in python_files(room):
        outside = {
            name.split(".")[0] for name in imported(path) if name.split(".")[0] not in sys.stdlib_module_names
        }
        assert outside <= {"octavo"}, f"{path.relative_to(ROOT)} imports {outside - {'octavo'}}"


@pytest.mark.parametrize("room", sorted(BELOW))
def test_dependencies_point_downwards(room: str) -> None:
    for path in python_files(room):
        rooms = {name.split(".")[1] for name in imported(path) if name.startswith("octavo.")}
        allowed = BELOW[room] | {room, "__version__"}
        assert rooms <= allowed, f"{path.relative_to(ROOT)} imports {rooms - allowed}"


def test_nobody_imports_a_bare_room() -> None:
    """``import engine`` works from the root of a checkout and makes a second copy of the module."""
    for path in python_files(*ROOMS, "tests", "tools", "src"):
        bare = {name for name in imported(path) if name.split(".")[0] in ROOMS}
        assert not bare, f"{path.relative_to(ROOT)} imports {bare}; import octavo.<room> instead"


def test_the_check_sees_a_bare_import(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from engine.core import x\n    import kernels\n")
    assert {name.split(".")[0] for name in imported(bad)} == {"engine", "kernels"}
