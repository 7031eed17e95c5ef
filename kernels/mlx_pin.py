"""Whether the installed MLX is the one that the native extension is built for.

MLX's C++ interface changes with each patch, so the extension of one version would crash, or worse, beside
another. The package therefore asks for one exact version; pip lets a later command install another.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable

_REQUIREMENT = re.compile(r"mlx(?:\[cpu\])?\s*==\s*([\w.]+)")


def wrong_mlx() -> str | None:
    """Describe a wrong version of MLX and the remedy, on one line; None if all is well or unknown."""
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
    """The version of MLX that requirements as in a package's metadata ask for."""
    found = (match for text in requirements if (match := _REQUIREMENT.match(text)) is not None)
    match = next(found, None)
    return None if match is None else match.group(1)
