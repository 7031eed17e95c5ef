"""Builds the native extension with emulated AVX-512 and AMX kernels, unless the build is up to date."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = (
    "-DOCTAVO_KERNEL_OPTIMIZATION=-O1",
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_CXX_FLAGS_RELEASE=-O0",  # code outside of kernels runs rarely, so it is built fast
    "-DSKBUILD_STATE=editable",
    f"-DPython_EXECUTABLE={sys.executable}",
)
# No precompiled headers, because ccache does not serve files that are compiled with them.
_CACHING = ("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache", "-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON")


@functools.cache
def why_unavailable() -> str | None:
    """Return why this machine cannot build the extension; None if it can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the emulator is for x86-64, this is {platform.machine()}"
    for tool in ("cmake", os.environ.get("CXX", "c++")):
        if _find(tool) is None:
            return f"{tool} is not installed"
    if importlib.util.find_spec("nanobind") is None:
        return "nanobind is not installed"
    return None


@functools.cache
def extension(*, only_amx: bool) -> Path:
    """Build the emulated ``_ext`` and return its folder. Raises RuntimeError with the compiler's message.

    With ``only_amx``, only AMX is emulated, which takes a third of the time. The CPU must have AVX-512.
    """
    emulated = "AMX" if only_amx else "ON"
    # One folder per Python version, because tests may run with several.
    folder = ROOT / "build" / f"x86_emulator-{emulated.lower()}-{sys.implementation.cache_tag}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes share one build
        built = built_extension()
        settings = {"OCTAVO_EMULATE_X86": emulated, "OCTAVO_BUILT": str(built or "")}
        if not settings.items() <= _settings(folder).items():
            generator = ("-G", "Ninja") if _find("ninja") else ()
            caching = _CACHING if _find("ccache") else ()
            options = (*OPTIONS, *(f"-D{name}={value}" for name, value in settings.items()))
            for former in folder.glob("_ext*.so"):
                former.unlink()
            _run("-S", str(ROOT), "-B", str(folder), *generator, *caching, *options)
        _run("--build", str(folder), "--target", "_ext", "--parallel", str(os.cpu_count() or 1))
    return folder


def built_extension() -> Path | None:
    """Return the folder of the installed extension's build, if it is up to date and for this interpreter."""
    wanted = {
        "CMAKE_HOME_DIRECTORY": str(ROOT),
        "CMAKE_BUILD_TYPE": "Release",
        "Python_EXECUTABLE": sys.executable,
        "OCTAVO_EMULATE_X86": "OFF",
        "OCTAVO_SANITIZE": "OFF",
    }
    for cache in sorted(ROOT.glob("build/*/CMakeCache.txt")):
        if wanted.items() <= _settings(cache.parent).items() and _is_complete(cache.parent):
            return cache.parent
    return None


def _is_complete(folder: Path) -> bool:
    csrc = ROOT / "kernels" / "csrc"
    shared = max(_changed(path) for path in (ROOT / "CMakeLists.txt", *csrc.rglob("*.h")))
    linked = max((_changed(path) for path in folder.glob("_ext*.so")), default=0.0)
    for source in csrc.rglob("*.cpp"):
        objects = list(folder.glob(f"CMakeFiles/*.dir/{source.relative_to(ROOT)}.o"))
        since = max(shared, _changed(source))
        if not objects or not all(since < _changed(path) <= linked for path in objects):
            return False
    return True


def _changed(path: Path) -> float:
    return path.stat().st_mtime


def _settings(folder: Path) -> dict[str, str]:
    cache = folder / "CMakeCache.txt"
    lines = cache.read_text().splitlines() if cache.exists() else []
    named = (line.partition("=") for line in lines if not line.startswith(("#", "//")))
    return {name.partition(":")[0]: value for name, _, value in named}


def _find(tool: str) -> str | None:
    beside = str(Path(sys.executable).parent)
    return shutil.which(tool, path=os.pathsep.join((os.environ.get("PATH", ""), beside)))


def _run(*arguments: str) -> None:
    cmake = _find("cmake")
    assert cmake is not None
    environment = os.environ | {
        "PATH": os.pathsep.join((os.environ["PATH"], str(Path(sys.executable).parent))),
        "CCACHE_BASEDIR": str(ROOT),
        "CCACHE_NOHASHDIR": "1",
    }
    done = subprocess.run([cmake, *arguments], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(
            f"the emulated extension does not build:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )


if __name__ == "__main__":
    reason = why_unavailable()
    print(extension(only_amx=False) if reason is None else f"not built: {reason}")
