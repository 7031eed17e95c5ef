"""Page formats by name. NumPy only, without MLX."""

from __future__ import annotations

import importlib
import pkgutil

from .base import FORMATS, RECIPE, FormatPair, PageFormat, format_pair
from .rotation import hadamard, rotation_block

FORMATS_WITH_KERNELS = ("bf16", "fp16", "int8", "int4", "fp4", "fp5", "mxfp4", "nvfp4", "affine8", "affine4")
"""Page formats with kernels on every backend, in listing order; other formats are listed after them."""

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
for _name in (*FORMATS_WITH_KERNELS, *sorted(FORMATS.keys() - set(FORMATS_WITH_KERNELS))):
    FORMATS[_name] = FORMATS.pop(_name)

FORMAT_NAMES = tuple(FORMATS)


def page_format(name: str) -> PageFormat:
    """Return the format called ``name``. Raises ValueError with the known names."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"page format {name!r} is not known; use one of {', '.join(FORMAT_NAMES)}") from None


def known_formats(name: str) -> bool:
    """Return whether ``name`` is a page format, or a pair "K/V" of formats."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part in FORMATS for part in parts)


__all__ = [
    "FORMATS_WITH_KERNELS",
    "FORMAT_NAMES",
    "RECIPE",
    "FormatPair",
    "PageFormat",
    "format_pair",
    "hadamard",
    "known_formats",
    "page_format",
    "rotation_block",
]
