from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import mlx.core as mx

from .cpus import allowed_cpus, available_threads
from .interface import AttentionBackend
from .reference.backend import ReferenceBackend

_REQUIREMENT = re.compile(r"mlx(?:\[cpu\])?\s*==\s*([\w.]+)")


def wrong_mlx() -> str | None:
    """Return a line about a wrong version of MLX, with a remedy; None if it is correct or unknown."""
    try:
        pinned = pinned_version(importlib.metadata.requires("octavo") or ())
        installed = importlib.metadata.version("mlx")
    except importlib.metadata.PackageNotFoundError:
        return None
    if pinned is None or installed == pinned:
        return None
    return (
        f"it was built for MLX {pinned}, but MLX {installed} with another C++ interface is installed; run: "
        f"pip install 'mlx[cpu]=={pinned}'"
    )


def pinned_version(requirements: Iterable[str]) -> str | None:
    """Return the version of MLX that a package's requirements pin; None without a pin."""
    found = (match for text in requirements if (match := _REQUIREMENT.match(text)) is not None)
    match = next(found, None)
    return None if match is None else match.group(1)


ABI_VERSION = 11
"""Version of the native extension's interface; csrc/module.cpp must have the same number."""

BackendName = Literal["auto", "metal", "cpu", "reference"]


@dataclass(frozen=True, slots=True)
class BackendSelection:
    """The chosen backend; ``reason`` says in one line why."""

    backend: AttentionBackend
    reason: str


def choose_backend(name: str, threads: int | None = None, *, exact: bool = False) -> BackendSelection:
    """Return the requested backend; "auto" takes the best available. Call it on the engine's thread.

    threads   threads of native CPU kernels (None: all cores that this process may use)
    exact     whether native attention over 4-bit pages rounds queries to 15 bits instead of 8

    Raises ValueError for an unknown name, a backend that cannot run here, or an invalid ``OCTAVO_CPU_*``
    variable.
    """
    if name not in get_args(BackendName):
        raise ValueError(f"backend {name!r} is not known; use one of {', '.join(get_args(BackendName))}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}; leave it out to use every core")
    if name == "reference":
        return BackendSelection(ReferenceBackend(), "MLX operations, as requested: slow but correct")
    if name == "metal" and not mx.metal.is_available():
        raise ValueError(
            "backend 'metal' cannot run: MLX finds no Metal device on this machine; use --backend auto"
        )
    if name == "metal" or (name == "auto" and mx.metal.is_available()):
        return _choose_metal(asked_for=name == "metal")
    native, problem = _load_native(threads, exact=exact)
    if native is not None:
        return native
    if name == "cpu":
        raise ValueError(
            f"backend 'cpu' cannot run: {problem}; reinstall with a C++20 compiler on the path, "
            "or use --backend reference"
        )
    return BackendSelection(ReferenceBackend(), f"MLX operations (the slow path): {problem}")


def set_up_device() -> None:
    if not mx.metal.is_available():
        mx.set_default_device(mx.cpu)
        mx.disable_compile()  # on a CPU it would run a C++ compiler while serving


def native_instructions() -> tuple[str, int]:
    """Return instruction set and threads of the native extension; ("none", 1) if it does not load."""
    try:
        from . import _ext
    except ImportError:
        return "none", 1
    return _ext.isa(), _ext.threads()


def row_tile(backend_name: str) -> int:
    return 16 if backend_name == "cpu" and native_instructions()[0] == "amx" else 1


def kernel_clock(backend_name: str) -> Callable[[], float] | None:
    """Return a clock, in seconds, of time spent in kernels; None if the backend has none."""
    if backend_name != "cpu":
        return None
    from . import _ext

    return _ext.kernel_seconds


def release_kept_memory(backend_name: str) -> None:
    """Free memory that native kernels keep between steps (at most 128 MiB)."""
    if backend_name != "cpu":
        return
    from . import _ext

    _ext.release_kept()


def _choose_metal(*, asked_for: bool) -> BackendSelection:
    from .metal.backend import MetalBackend

    backend = MetalBackend()
    problem = backend.find_problem()
    if problem is None:
        return BackendSelection(backend, "Metal kernels, which pass a short self-test on this device")
    doctor = "`octavo doctor --backend metal` shows all results"
    if asked_for:
        reason = f"Metal kernels, as requested, although they fail their self-test here ({problem}); {doctor}"
        return BackendSelection(backend, reason)
    return BackendSelection(
        ReferenceBackend(),
        "MLX operations on the Metal device (slow): the Metal kernels fail their self-test here "
        f"({problem}); {doctor}",
    )


def _load_native(threads: int | None, *, exact: bool) -> tuple[BackendSelection | None, str]:
    if (wrong := wrong_mlx()) is not None:
        return None, f"the native CPU extension does not load ({wrong})"
    try:
        from . import _ext
    except ImportError as error:  # not built, or built for another MLX
        if str(error).startswith("OCTAVO_CPU_"):  # the user set this variable, so do not fall back
            raise ValueError(str(error)) from error
        return None, f"the native CPU extension does not load ({error})"
    built = getattr(_ext, "ABI_VERSION", 0)
    if built != ABI_VERSION:
        return (
            None,
            "the native CPU extension does not load (it was built from other sources, with interface "
            f"version {built} instead of {ABI_VERSION}; build it again)",
        )
    from .cpu.backend import CpuBackend

    if threads is None and not os.environ.get("OCTAVO_CPU_THREADS") and available_threads() < allowed_cpus():
        threads = available_threads()
    backend = CpuBackend(threads, exact=exact)
    return BackendSelection(backend, f"native CPU kernels ({_ext.isa()}, {_ext.threads()} threads)"), ""
