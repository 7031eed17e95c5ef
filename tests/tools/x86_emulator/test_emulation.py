"""The emulation of AVX-512 and AMX: values worked out by hand, and faults that it must report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import x86_emulator
from x86_emulator import build as building

pytestmark = [pytest.mark.emulator, pytest.mark.slow]

FOLDER = Path(x86_emulator.__file__).parent
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"}
AMX = {"amx_tile", "amx_bf16", "amx_int8"}
REAL = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-Wno-uninitialized", "-Wno-maybe-uninitialized")

if reason := x86_emulator.why_unavailable():
    pytest.skip(reason, allow_module_level=True)


def build(target: Path, options: Sequence[str], *, tiles: bool) -> Path:
    sources = (str(FOLDER / "check.cpp"), str(FOLDER / "check_tiles.cpp"))
    common = ("-std=gnu++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-DOCTAVO_CHECK_TILES={int(tiles)}")
    compiler = os.environ.get("CXX", "c++")
    done = subprocess.run(
        [compiler, *common, *options, *sources, "-o", str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


def cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return set(found[1].split()) if found else set()


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "avx2" not in cpu_flags():
        pytest.skip("the emulator is compiled for AVX2, which this CPU lacks")
    options = ("-march=x86-64-v3", "-Wno-psabi", f"-I{FOLDER / 'include'}")
    return build(tmp_path_factory.mktemp("x86") / "emulated", options, tiles=True)


def test_every_instruction_follows_the_manual(emulated: Path) -> None:
    done = subprocess.run([emulated], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_hardware_agrees(tmp_path: Path) -> None:
    flags = cpu_flags()
    if not flags >= AVX512:
        pytest.skip(f"this CPU lacks {', '.join(sorted(AVX512 - flags))}")
    tiles = flags >= AMX
    amx = ("-mamx-tile", "-mamx-bf16", "-mamx-int8") if tiles else ()
    done = subprocess.run(
        [build(tmp_path / "real", (*REAL, *amx), tiles=tiles)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("misuse", "message"),
    [("aligned load", "an aligned load is not aligned"), ("tiles", "the shapes of three tiles do not fit")],
)
def test_faults_end_the_program(emulated: Path, misuse: str, message: str) -> None:
    done = subprocess.run([emulated, misuse], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stderr


def names(folder: Path, pattern: str, form: str = r"\b((?:_mm\d*|_tile)_\w+)") -> set[str]:
    return {
        name
        for path in folder.rglob(pattern)
        if path.is_file()
        for name in re.findall(form, path.read_text())
    }


def test_every_emulated_instruction_is_used_and_has_a_value_worked_out() -> None:
    defined = names(FOLDER / "include", "*.h", r"(?:OCTAVO_EMULATED \w+|#define) ((?:_mm\d*|_tile)_\w+)\(")
    kinds = {"_tile_dpbssd", "_tile_dpbsud", "_tile_dpbusd", "_tile_dpbuud"}
    assert "_mm512_dpbf16_ps" in defined
    assert defined - names(FOLDER.parents[1] / "kernels" / "csrc", "*") - kinds == set()
    assert defined - names(FOLDER, "*.cpp") - {"_mm_prefetch"} == set()


def test_objects_of_the_installation_are_taken_while_they_are_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "ROOT", tmp_path)
    sources = [tmp_path / "kernels" / "csrc" / name for name in ("ops/a.cpp", "ops/b_portable.cpp")]
    header, folder = tmp_path / "kernels" / "csrc" / "ops" / "a.h", tmp_path / "build" / "cp3"
    objects = [
        folder / "CMakeFiles" / f"{target}.dir" / f"{source.relative_to(tmp_path)}.o"
        for target, source in (("_ext", sources[0]), ("kernels_avx2", sources[1]))
    ]
    settings = {
        "CMAKE_HOME_DIRECTORY:INTERNAL": tmp_path,
        "CMAKE_BUILD_TYPE:STRING": "Release",
        "Python_EXECUTABLE:PATH": sys.executable,
        "OCTAVO_EMULATE_X86:STRING": "OFF",
        "OCTAVO_SANITIZE:BOOL": "OFF",
    }
    cache, extension = folder / "CMakeCache.txt", folder / "_ext.so"
    inputs = (tmp_path / "CMakeLists.txt", header, *sources)
    for path, when in [*((path, 1) for path in inputs), *((path, 2) for path in objects), (extension, 3)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (when, when))

    def set_to(**changed: str) -> None:
        told = {name: changed.get(name.partition(":")[0], value) for name, value in settings.items()}
        cache.write_text("".join(["# ours\n", *(f"{name}={value}\n" for name, value in told.items())]))

    set_to()
    assert building.built_extension() == folder
    for name in ("OCTAVO_SANITIZE", "OCTAVO_EMULATE_X86"):
        set_to(**{name: "ON"})
        assert building.built_extension() is None
    set_to(Python_EXECUTABLE="/another/python")
    assert building.built_extension() is None
    set_to()
    for path in inputs:
        os.utime(path, (4, 4))
        assert building.built_extension() is None, path
        os.utime(path, (1, 1))
    os.utime(extension, (1, 1))  # older than its sources
    assert building.built_extension() is None
    os.utime(extension, (3, 3))
    objects[1].unlink()
    assert building.built_extension() is None
