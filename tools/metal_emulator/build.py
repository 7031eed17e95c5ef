"""From an assembled kernel to a shared library, through a cache on disk.

Everything in the cache is named by the hash of what it was made from and put in place by a rename, so
that test processes may share it and it may be deleted at any time. It lies in $OCTAVO_METAL_CACHE, else
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

# Warnings that only the shim's way of being Metal gives rise to.
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
    "-ffp-contract=fast",  # a product and a sum round once where they can: Metal does so in every math_mode
    *("-Xclang", "-cl-single-precision-constant"),  # 0.1 is a float
    *("-Xclang", "-ffloat16-excess-precision=none"),  # every half operation rounds
    *("-fno-vectorize", "-fno-slp-vectorize"),  # which would merge accesses that are to be checked
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
    "-fno-sanitize=pointer-overflow",  # an address is checked where it is used; this is a tenth of the time
)
# Checked loops stay loops: unrolled, each pass has checks of its own, and most kernels take two to three
# times as long to compile. They are as slow to run either way, for every access is a call.
_UNROLLED = '_Pragma("clang loop unroll(full)")'
_UNCHECKED_FLAGS = ("-O2", "-ftrivial-auto-var-init=pattern")
# A profile of a compiler that fuses nothing: results may not hang on contraction either way.
NO_CONTRACTION = ("-ffp-contract=off",)
# A profile that shows which kernels lean on the exact rules of floating point (Metal's math_mode fast).
FAST_MATH = ("-ffast-math",)


@dataclass(frozen=True)
class Built:
    library: Path
    warnings: str


def cache_directory() -> Path:
    """Where compiled kernels are kept; made when it is missing."""
    named = os.environ.get(CACHE_VARIABLE)
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(named) if named else user_cache / "octavo-metal-emulator"
    path.mkdir(parents=True, exist_ok=True)
    return path


def build(assembled: Assembled, *, checks: bool = True, extra_flags: Sequence[str] = ()) -> Built:
    """Compile and link with the runtime; raises MetalCompileError with the compiler's words."""
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
    """A name for what is made from these texts by this compiler."""
    compiler = find_compiler()
    everything = "\0".join([*compiler.command, compiler.version, *parts])
    return hashlib.sha256(everything.encode()).hexdigest()[:24]


def run_compiler(arguments: Iterable[str | Path], what: str) -> str:
    """Run it and return what it said on stderr."""
    return _run([*find_compiler().command, *arguments], what)


def _run(command: Iterable[str | Path], what: str) -> str:
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True)
    if done.returncode:
        raise MetalCompileError(f"{what}:\n{done.stderr}")
    return done.stderr


@cache
def source_lines(library: Path, offset: int) -> str:
    """Where an instruction of a checked library comes from: "name:line", callers after an arrow."""
    command = ["addr2line", "-s", "-i", "-e", str(library), hex(offset - 1)]
    try:
        frames = subprocess.run(command, check=False, capture_output=True, text=True).stdout.split()
    except FileNotFoundError:  # binutils: any machine that links has them
        return f"library offset {offset:#x}"
    own = [frame for frame in frames if not frame.startswith(("msl_", "metal.h", "?", "("))]
    return " <- ".join(own[:3]) or "".join(frames[:1])


@cache
def _linker() -> tuple[str, ...]:
    """Gold, where it is installed, and started by g++: binutils' other linker takes twice as long, and clang
    as long to start it as it takes to link. Zig brings its own."""
    command = find_compiler().command
    if find_compiler().is_zig or not shutil.which("ld.gold"):
        return command
    return (*(("g++",) if shutil.which("g++") else command), "-fuse-ld=gold")


def _mode_flags(checks: bool) -> tuple[str, ...]:
    if not find_compiler().is_zig:
        return _CHECKED_FLAGS if checks else _UNCHECKED_FLAGS
    # zig sanitizes by default, and adds stack checks that fibers do not survive
    mode = _CHECKED_FLAGS if checks else (*_UNCHECKED_FLAGS, "-fno-sanitize=all")
    return (*mode, "-fno-stack-protector")


@cache
def _sources_key(folder: Path) -> str:
    """Of all the files of one folder, and of where it is: precompiled headers remember that."""
    texts = (f"{path.name}\n{path.read_text()}" for path in sorted(folder.iterdir()) if path.is_file())
    return content_key(str(folder), *texts)


def precompiled_shim(flags: Sequence[str]) -> Path:
    """The shim as these flags compile it, for `-include-pch` next to the same flags."""
    key = content_key(_sources_key(SHIM), _sources_key(RUNTIME), *flags)
    target = cache_directory() / f"shim-{key}.pch"
    # without time stamps: the content is part of the name
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
    """Compile into the cache unless it is there."""
    if target.exists():
        return
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        made = Path(folder) / target.name
        run_compiler([*arguments, "-o", made], failure)
        os.replace(made, target)
