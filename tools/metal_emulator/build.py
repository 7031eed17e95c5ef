"""Builds a shared library from an assembled kernel, with a cache on disk.

Test processes may share the cache, and it may be deleted at any time. It is in $OCTAVO_METAL_CACHE, or else
in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from metal_emulator.assemble import Assembled
from metal_emulator.compiler import find_compiler
from metal_emulator.errors import MetalCompileError
from metal_emulator.rewrite import unit_source

CACHE_VARIABLE = "OCTAVO_METAL_CACHE"
_ROOM = Path(__file__).resolve().parent
RUNTIME = _ROOM / "runtime"
SHIM = _ROOM / "shim"

# Warnings that the shim causes, not kernels.
_NO_WARNINGS = (
    "unknown-attributes",
    "static-float-init",
    "undefined-var-template",
    "unused-parameter",
    "unused-function",
    "unused-variable",
    "unused-but-set-variable",
    "unused-local-typedef",
    "reserved-user-defined-literal",
    "user-defined-literals",
    "duplicate-decl-specifier",
    "ignored-qualifiers",
    "c99-extensions",
)
LANGUAGE_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-ffp-contract=fast",  # fuse a product and a sum where possible, as Metal does in every math_mode
    *("-Xclang", "-cl-single-precision-constant"),  # the constant 0.1 is a float
    *("-Xclang", "-ffloat16-excess-precision=none"),  # every operation on half rounds its result
    *("-fno-vectorize", "-fno-slp-vectorize"),  # vectorizing would merge accesses, which are checked
    "-Wall",
    "-Wextra",
    *(f"-Wno-{name}" for name in _NO_WARNINGS),
    f"-I{SHIM}",
)
_CHECKED_FLAGS = (
    "-O1",
    "-gline-tables-only",
    "-ftrivial-auto-var-init=pattern",  # uninitialised variables are NaN
    "-fsanitize=thread",
    *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-read-before-write=1"),
    "-fsanitize=undefined,float-cast-overflow",
    "-fno-sanitize=vptr,function,float-divide-by-zero",
    "-fno-sanitize=pointer-overflow",  # addresses are checked where they are used; saves a tenth of the time
)
# Checked builds drop this pragma: checks in an unrolled loop make compiling two to three times as long.
_UNROLLED = '_Pragma("clang loop unroll(full)")'
_UNCHECKED_FLAGS = ("-O2", "-ftrivial-auto-var-init=pattern")
# Turns the fusing of multiply and add off. Tests use it because results must not depend on fusing.
NO_CONTRACTION = ("-ffp-contract=off",)
# Flags like Metal's math_mode fast, which show the kernels that need the exact rules of floating point.
FAST_MATH = ("-ffast-math",)


@dataclass(frozen=True)
class Built:
    library: Path
    warnings: str


def cache_directory() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(named) if named else user_cache / "octavo-metal-emulator"
    path.mkdir(parents=True, exist_ok=True)
    return path


def build(assembled: Assembled, *, checks: bool = True, extra_flags: Sequence[str] = ()) -> Built:
    """Compile a kernel and link it with the runtime. Raises MetalCompileError with the compiler's message."""
    unit = unit_source(assembled)
    if checks:
        unit = unit.replace(_UNROLLED, "")
    flags = (*LANGUAGE_FLAGS, *_mode_flags(checks), *find_compiler().target_flags, *extra_flags)
    prelude, runtime = precompiled_shim(flags), _runtime_objects()
    key = content_key(unit, *flags, prelude.name, *(path.name for path in runtime))
    library = cache_directory() / f"kernel-{key}.so"
    warnings = library.with_suffix(".warnings")
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache_directory(), prefix="build-") as folder:
            source, kernel = Path(folder) / "kernel.cpp", Path(folder) / "kernel.o"
            source.write_text(unit)
            said = run_compiler(
                [*flags, "-include-pch", prelude, "-c", source, "-o", kernel], "the kernel does not compile"
            )
            linked = Path(folder) / "kernel.so"
            link: list[str | Path] = [
                "-shared",
                "-Wl,-Bsymbolic",
                kernel,
                *runtime,
                "-o",
                linked,
                "-lm",
                "-ldl",
            ]
            _run([*_linker(), *link], "the kernel does not link")
            (Path(folder) / "warnings").write_text(said)
            os.replace(Path(folder) / "warnings", warnings)
            os.replace(linked, library)
    return Built(library, warnings.read_text())


def content_key(*parts: str) -> str:
    compiler = find_compiler()
    everything = "\0".join([*compiler.command, compiler.version, *parts])
    return hashlib.sha256(everything.encode()).hexdigest()[:24]


def run_compiler(arguments: Iterable[str | Path], what: str) -> str:
    """Run the compiler; return its standard error. Raises MetalCompileError, which begins with ``what``."""
    return _run([*find_compiler().command, *arguments], what)


def _run(command: Iterable[str | Path], what: str) -> str:
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True)
    if done.returncode:
        raise MetalCompileError(f"{what}:\n{done.stderr}")
    return done.stderr


@cache
def source_lines(library: Path, offset: int) -> str:
    """Return the source line of an instruction as "name:line", with its callers after arrows."""
    command = ["addr2line", "-s", "-i", "-e", str(library), hex(offset - 1)]
    try:
        frames = subprocess.run(command, check=False, capture_output=True, text=True).stdout.split()
    except FileNotFoundError:  # addr2line is not installed
        return f"library offset {offset:#x}"
    own = [frame for frame in frames if not frame.startswith(("msl_", "metal.h", "?", "("))]
    return " <- ".join(own[:3]) or "".join(frames[:1])


@cache
def _linker() -> tuple[str, ...]:
    command = find_compiler().command
    if find_compiler().is_zig or not shutil.which("ld.gold"):
        return command
    return (*(("g++",) if shutil.which("g++") else command), "-fuse-ld=gold")


def _mode_flags(checks: bool) -> tuple[str, ...]:
    if not find_compiler().is_zig:
        return _CHECKED_FLAGS if checks else _UNCHECKED_FLAGS
    # By default, zig sanitizes and adds stack checks, which fail in fibers.
    mode = _CHECKED_FLAGS if checks else (*_UNCHECKED_FLAGS, "-fno-sanitize=all")
    return (*mode, "-fno-stack-protector")


@cache
def _sources_key(folder: Path) -> str:
    texts = (f"{path.name}\n{path.read_text()}" for path in sorted(folder.iterdir()) if path.is_file())
    return content_key(str(folder), *texts)


def precompiled_shim(flags: Sequence[str]) -> Path:
    key = content_key(_sources_key(SHIM), _sources_key(RUNTIME), *flags)
    target = cache_directory() / f"shim-{key}.pch"
    # No time stamps are needed, because the file's name has the hash of its content.
    header: list[str | Path] = ["-Xclang", "-fno-pch-timestamp", "-x", "c++-header", SHIM / "mlx_utils.h"]
    _make(target, [*flags, *header], "the emulator's Metal headers do not compile")
    return target


def _runtime_objects() -> list[Path]:
    compiler = find_compiler()
    unchecked = ("-fno-sanitize=all",) if compiler.is_zig else ()
    flags = ("-std=c++17", "-O2", "-fPIC", "-fno-exceptions", "-fno-rtti", *compiler.target_flags, *unchecked)
    key = content_key(_sources_key(RUNTIME), *flags)
    objects = []
    for source in sorted(RUNTIME.glob("*.cpp")):
        target = cache_directory() / f"runtime-{source.stem}-{key}.o"
        _make(target, [*flags, "-c", source], f"the emulator's {source.name} does not compile")
        objects.append(target)
    return objects


def _make(target: Path, arguments: Sequence[str | Path], failure: str) -> None:
    if target.exists():
        return
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        made = Path(folder) / target.name
        run_compiler([*arguments, "-o", made], failure)
        os.replace(made, target)
