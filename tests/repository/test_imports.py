from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("block_manager", "engine", "integrations", "kernels", "lab", "proto", "scheduler")
NAMES = {"lab": "octavo_lab"}  # folder: package name; other folders are octavo.<folder>
LIGHT = (
    "octavo.block_manager", "octavo.scheduler", "octavo.engine", "octavo.engine.api.config",
    "octavo_lab.cache_sim.run", "octavo.engine.cli", "octavo.engine.client.client",
    "octavo.engine.core.build", "octavo.engine.core.engine_thread", "octavo.engine.executor.base",
    "octavo.engine.executor.batch", "octavo.engine.executor.load", "octavo.engine.executor.sampling.sampler",
    "octavo.engine.frontend.async_engine", "octavo.engine.frontend.llm", "octavo.engine.grpc",
    "octavo.engine.grpc.vllm.service", "octavo.engine.http.server",
    "octavo.engine.inspection.prefix_cache_inspector", "octavo.engine.kv_store.page_store",
    "octavo.engine.memory.malloc", "octavo.engine.memory.model_files", "octavo.engine.memory.planner",
    "octavo.engine.memory.sizing", "octavo.engine.speculation.drafting",
    "octavo.engine.observability.prometheus", "octavo.kernels.formats", "octavo.kernels.groups",
    "octavo.kernels.kv_cache", "octavo.kernels.metadata", "octavo.kernels.residual_cache",
    "octavo.kernels.visibility",
)  # fmt: skip
BELOW = {  # top-level folder: folders that it may import
    "block_manager": set(), "scheduler": {"block_manager"}, "kernels": set(),
    "engine": {"block_manager", "scheduler", "kernels", "proto", "v1"}, "integrations": {"engine"},
    "proto": {"v1"}, "lab": {"block_manager", "scheduler", "kernels", "engine", "v1"},
}  # fmt: skip
ENGINE_PACKAGES = {  # package of engine: engine packages that it may import
    "api": set(),
    "bench": set(),
    "chat": {"api"},
    "tokenizer": {"api", "chat", "memory"},
    "gguf": {"api"},
    "memory": {"api", "gguf"},
    "inspection": {"api"},
    "observability": {"api"},
    "http": {"api", "chat", "frontend", "grpc", "tokenizer", "vision"},
    "kv_events": {"api", "core", "frontend", "grpc"},
    "structured_output": {"api", "chat", "memory", "tokenizer"},
    "kv_store": {"api", "memory"},
    "executor": {"api", "kv_store", "memory", "structured_output"},
    "speculation": {"api", "executor"},
    "core": {
        "api", "executor", "inspection", "kv_store", "speculation", "structured_output", "tokenizer",
    },
    "vision": {"api", "structured_output"},
    "frontend": {"api", "chat", "core", "structured_output", "tokenizer", "vision"},
    "grpc": {"api", "chat", "core", "frontend", "inspection", "memory", "tokenizer", "vision"},
    "client": {"api", "grpc", "vision"},
    "arguments": {"api", "client", "grpc", "memory"},
    "cli": {
        "api", "arguments", "client", "executor", "frontend", "grpc", "http", "kv_events", "kv_store",
        "memory", "observability",
    },
}  # fmt: skip
TENSOR_LIBRARIES = {"mlx", "mlx_lm", "mlx_vlm"}
ON_TENSORS = {  # modules of kernels that import MLX: files that may import them
    "octavo.kernels._ext": {"executor"}, "octavo.kernels.backends": {"executor", "cli"},
    "octavo.kernels.cpu": set(), "octavo.kernels.kv_cache": {"executor"}, "octavo.kernels.metal": set(),
    "octavo.kernels.reference": set(), "octavo.kernels.verify": {"cli", "executor"},
}  # fmt: skip


BARE = re.compile(rf"^ *(from|import) ({'|'.join(FOLDERS)})\b", re.MULTILINE)


def python_files(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in files if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))]


def package_name(path: Path) -> tuple[str, ...]:
    top, *rest = path.parts or ("",)
    return (NAMES[top], *rest) if top in NAMES else ("octavo", *path.parts)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported(path: Path) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = package_name(path.relative_to(ROOT).parent)
            above = home[: len(home) - node.level + 1] if node.level else ()
            module = ".".join((*above, *([node.module] if node.module else [])))
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def spelled_out(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)]
    return {node.module for node in nodes if not node.level and node.module}


def engine_package(name: str) -> str | None:
    parts = name.split(".")
    return parts[2] if parts[:2] == ["octavo", "engine"] and len(parts) > 2 else None


def package_of(path: Path) -> str | None:
    return engine_package(".".join(("octavo", *path.relative_to(ROOT).parts)))


def engine_arrows() -> dict[str, set[str]]:
    arrows: dict[str, set[str]] = {}
    for path in python_files("engine"):
        package = package_of(path)
        if package is not None and package != "__init__":
            used = {other for name in imported(path) if (other := engine_package(name)) is not None}
            arrows.setdefault(package, set()).update(used & ENGINE_PACKAGES.keys() - {package})
    return arrows


def circle(arrows: Mapping[str, set[str]]) -> tuple[str, ...]:
    try:
        tuple(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        return tuple(error.args[1])
    return ()


def module_arrows(root: Path) -> dict[str, set[str]]:
    files = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    names = {path: ".".join(package_name(path.relative_to(root).with_suffix(""))) for path in files}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    arrows: dict[str, set[str]] = {}
    for path, name in names.items():
        found: set[str] = set()
        for node in without_types(parsed(path)):
            if isinstance(node, ast.ImportFrom):
                home = package_name(path.relative_to(root).parent)
                above = home[: len(home) - node.level + 1] if node.level else ()
                module = ".".join((*above, *([node.module] if node.module else [])))
                inside = {f"{module}.{alias.name}" for alias in node.names} & set(names.values())
                found |= inside or {module}
        arrows[name] = found & set(names.values()) - {name}
    return arrows


def without_types(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from without_types(node)


def test_importing_the_control_plane_leaves_mlx_out() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {LIGHT}:\n"
        "    importlib.import_module(name)\n"
        "    found = {'mlx', 'mlx.core', 'mlx_lm', 'transformers'} & set(sys.modules)\n"
        "    assert not found, f'importing {name} imports {found}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["block_manager", "scheduler"])
def test_the_pure_packages_use_the_standard_library_alone(package: str) -> None:
    for path in python_files(package):
        outside = {
            name.split(".")[0] for name in imported(path) if name.split(".")[0] not in sys.stdlib_module_names
        }
        assert outside <= {"octavo"}, f"{path.relative_to(ROOT)} imports {outside - {'octavo'}}"


@pytest.mark.parametrize("package", sorted(BELOW))
def test_dependencies_point_downwards(package: str) -> None:
    for path in python_files(package):
        packages = {name.split(".")[1] for name in imported(path) if name.startswith("octavo.")}
        allowed = BELOW[package] | {package, "__version__"}
        assert packages <= allowed, f"{path.relative_to(ROOT)} imports {packages - allowed}"


@pytest.mark.parametrize("package", sorted(ENGINE_PACKAGES))
def test_engine_packages_import_only_lower_packages(package: str) -> None:
    for path in python_files(f"engine/{package}"):
        packages = {other for name in imported(path) if (other := engine_package(name)) in ENGINE_PACKAGES}
        outside = packages - ENGINE_PACKAGES[package] - {package}
        assert not outside, f"{path.relative_to(ROOT)} imports {outside}"


def test_every_package_of_engine_has_its_rule() -> None:
    folders = {path.parent.name for path in (ROOT / "engine").glob("*/__init__.py")}
    assert folders == ENGINE_PACKAGES.keys()


def test_no_packages_of_engine_import_each_other() -> None:
    assert circle(ENGINE_PACKAGES) == ()
    assert circle(engine_arrows()) == ()
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}


def rooms(folder: str) -> dict[str, set[str]]:
    home = ("octavo", *folder.split("/"))
    arrows: dict[str, set[str]] = {}
    for path in python_files(folder):
        room = path.relative_to(ROOT / folder).with_suffix("").parts[0]
        names = [name.split(".") for name in imported(path)]
        inside = {
            name[len(home)] for name in names if tuple(name[: len(home)]) == home and len(name) > len(home)
        }
        arrows.setdefault(room, set()).update(inside - {room})
    return arrows


@pytest.mark.parametrize("folder", ["engine/executor", "engine/core"])
def test_the_rooms_of_a_package_have_an_order(folder: str) -> None:
    found = rooms(folder)
    assert len(set().union(*found.values())) > 5
    assert circle(found) == ()


def test_no_modules_import_each_other(tmp_path: Path) -> None:
    """Imports inside functions count too."""
    assert circle(module_arrows(ROOT)) == ()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.py").write_text("def f():\n    from .b import B\n")
    (tmp_path / "kernels" / "b.py").write_text("from . import a\n")
    assert set(circle(module_arrows(tmp_path))) == {"octavo.kernels.a", "octavo.kernels.b"}


def test_the_executor_alone_computes_with_tensors() -> None:
    for path in python_files("engine"):
        package, names = package_of(path), imported(path)
        libraries = {name.split(".")[0] for name in names} & TENSOR_LIBRARIES
        assert package == "executor" or not libraries, f"{path.relative_to(ROOT)} imports {libraries}"
        for part, users in ON_TENSORS.items():
            uses = any(name == part or name.startswith(f"{part}.") for name in names)
            assert not uses or package in users, f"{path.relative_to(ROOT)} imports {part}"


def test_kernels_know_no_model_code() -> None:
    for path in python_files("kernels"):
        models = {name for name in imported(path) if name.split(".")[0] == "mlx_lm"}
        models |= {name for name in imported(path) if name.startswith("mlx.nn")}
        assert not models, f"{path.relative_to(ROOT)} imports {models}"


def test_serving_does_not_import_the_laboratory() -> None:
    for path in python_files(*BELOW.keys() - {"lab"}):
        names = {name for name in imported(path) if name.split(".")[0] == "octavo_lab"}
        assert not names, f"{path.relative_to(ROOT)} imports {names}"


@pytest.mark.parametrize("folder", sorted(set(FOLDERS) - {"proto"}))
def test_imports_inside_a_folder_are_relative(folder: str) -> None:
    for path in python_files(folder):
        package = ".".join(package_name(Path(folder)))
        own = {name for name in spelled_out(path) if f"{name}.".startswith(f"{package}.")}
        assert not own, f"{path.relative_to(ROOT)} spells out {own}"


def test_no_module_imports_a_bare_folder() -> None:
    """``import engine`` works at a checkout's root, but makes a second copy of the module."""
    for path in python_files(*FOLDERS, "tests", "tools", "src"):
        bare = BARE.search(path.read_text())
        assert bare is None, f"{path.relative_to(ROOT)} has {bare}; import octavo.<package> instead"
