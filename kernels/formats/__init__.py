"""Page formats by name. NumPy only: the memory planner and every backend share them."""

from __future__ import annotations

from .affine import AFFINE4, AFFINE8
from .base import PageFormat
from .fp4 import FP4
from .fp5 import FP5
from .half import BF16, FP16
from .integer import INT4, INT8
from .microscaling import MXFP4, NVFP4
from .pair import RECIPE, FormatPair, format_pair
from .rotation import hadamard, rotation_block

_FORMATS: dict[str, PageFormat] = {
    fmt.name: fmt
    for fmt in (BF16(), FP16(), INT8(), INT4(), FP4(), FP5(), MXFP4(), NVFP4(), AFFINE8(), AFFINE4())
}

FORMAT_NAMES = tuple(_FORMATS)


def page_format(name: str) -> PageFormat:
    """The format called ``name``; ValueError lists the names there are."""
    try:
        return _FORMATS[name]
    except KeyError:
        raise ValueError(f"page format {name!r} is not known; use one of {', '.join(FORMAT_NAMES)}") from None


def known_formats(name: str) -> bool:
    """Whether ``name`` is a page format, or two as "K/V"."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part in _FORMATS for part in parts)


__all__ = [
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
