"""Check that the installed MLX is the one that the native extension is built for.

MLX's C++ interface changes with each patch, so an extension for another version would crash or compute wrong
results. The package therefore requires one exact version, but pip lets a later command install another.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable

_REQUIREMENT = re.compile(r"mlx(?:\[cpu\])?\s*==\s*([\w.]+)")


def wrong_mlx() -> str | None:
    """Return one line about a wrong version of MLX and the remedy; None if it is right or unknown."""
    try:
        pinned = pinned_version(importlib.metadata.requires("octavo") or ())
        installed = importlib.metadata.version("mlx")
    except importlib.metadata.PackageNotFoundError:
        return None
    if pinned is None or installed == pinned:
        return None
    return (
        f"it is built for MLX {pinned}, and {installed} is installed, whose C++ interface differs; run: "
        f"pip install 'mlx[cpu]=={pinned}'"
    )


def pinned_version(requirements: Iterable[str]) -> str | None:
    """Return the version of MLX in a package's requirements, in the form of its metadata."""
    found = (match for text in requirements if (match := _REQUIREMENT.match(text)) is not None)
    match = next(found, None)
    return None if match is None else match.group(1)
