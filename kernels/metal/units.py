"""Assembly of kernel sources: macros, then files of ``sources``.

A *unit* is a header and a body for ``mx.fast.metal_kernel``. In a ``.metal`` file, the line ``//! body``
separates helpers from the kernel's body.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np

from ..formats import PageFormat, rotation_block

MAX_WRITE_SIMDGROUPS = 16
"""Largest number of simdgroups in a threadgroup that stores the K and V of one token."""

MIN_ELEMENTS = 8
"""Least size of a kernel's input: MLX puts smaller arrays into another address space, which changes the
kernel's signature."""

_BODY = "//! body\n"
_COMMENT = re.compile(r"//.*")


@dataclass(frozen=True, slots=True)
class FormatSource:
    struct: str
    files: tuple[str, ...]
    tile_bytes: int
    raw_words: int
    words: bool = False


_FORMATS = {
    "bf16": FormatSource("Bf16", ("format_half",), 2, 4),
    "fp16": FormatSource("Fp16", ("format_half",), 2, 4),
    "int8": FormatSource("Int8", ("packing", "format_integer"), 2, 2),
    "int4": FormatSource("Int4", ("packing", "format_integer"), 2, 1, words=True),
    "fp4": FormatSource("Fp4", ("format_fp4",), 2, 1, words=True),
    "fp5": FormatSource("Fp5", ("packing", "format_fp4", "format_fp5"), 2, 2),
    "mxfp4": FormatSource("Mxfp4", ("packing", "format_fp4", "format_microscaling"), 2, 1, words=True),
    "nvfp4": FormatSource("Nvfp4", ("packing", "format_fp4", "format_microscaling"), 2, 1, words=True),
    "affine8": FormatSource("Affine8", ("packing", "format_affine"), 4, 2),
    "affine4": FormatSource("Affine4", ("packing", "format_affine"), 4, 1, words=True),
}
METAL_FORMATS = tuple(_FORMATS)


@dataclass(frozen=True, slots=True)
class KernelSource:
    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    header: str
    source: str


def strip_source(text: str) -> str:
    """Remove comments, indentation and empty lines, because MLX hashes the text at each launch."""
    lines = (_COMMENT.sub("", line).strip() for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


@functools.cache
def read_source(name: str) -> tuple[str, str]:
    """Return helpers and body of a file in ``sources``; the body is empty if there is none."""
    text = resources.files("octavo.kernels.metal").joinpath("sources", f"{name}.metal").read_text("utf-8")
    helpers, _, body = text.partition(_BODY)
    return helpers, body


def format_source(name: str) -> FormatSource:
    """Return the Metal code of the page format ``name``; ValueError if there is none."""
    if name not in _FORMATS:
        raise ValueError(f"there is no Metal kernel for {name} pages; use {', '.join(METAL_FORMATS)}")
    return _FORMATS[name]


def lane_dim(dim: int) -> int:
    """Return how many values of a row each lane holds, after padding to a power of two."""
    return int(max(32, 1 << (dim - 1).bit_length())) // 32


def row_lanes(dim: int) -> int:
    return int(1 << (dim // 8 - 1).bit_length())


def loads_in_flight(fmt: PageFormat, dim: int) -> int:
    return min(row_lanes(dim), 8 // format_source(fmt.name).raw_words)


def norm_bits(dim: int) -> str:
    return f"0x{int(np.float32(1 / np.sqrt(rotation_block(dim))).view(np.uint32)):08X}u"


def in_runs(fmt: PageFormat, dim: int) -> int:
    return int(format_source(fmt.name).words and 32 % (dim // 8) != 0)


def check_dim(name: str, dim: int, most: int = 256) -> None:
    """Raise ValueError unless kernels can spread a row of ``dim`` values over a simdgroup."""
    if dim % 8 or not 8 <= dim <= most:
        raise ValueError(
            f"{name} must be a multiple of 8 from 8 to {most} for the Metal kernels, got {dim}; "
            "use --backend reference"
        )


def has_scales(fmt: PageFormat, dim: int) -> bool:
    return fmt.scales_per_row(dim) > 0


def write_unit(k_format: PageFormat, v_format: PageFormat, key_dim: int, value_dim: int) -> KernelSource:
    parts: list[str] = []
    macros: dict[str, int | str] = {"MAX_SIMDGROUPS": MAX_WRITE_SIMDGROUPS}
    for letter, name, fmt, dim in (("k", "KEY", k_format, key_dim), ("v", "VALUE", v_format, value_dim)):
        scaled = has_scales(fmt, dim)
        parts += [f"{letter}_codes", *([f"{letter}_scales"] if scaled else [])]
        macros |= {
            f"{name}_DIM": dim,
            f"{name}_LANE": lane_dim(dim),
            f"ROTATE_{name}S": int(fmt.rotates),
            f"{name}_NORM_BITS": norm_bits(dim),
            f"{name}_SCALES": f"{letter}_scales" if scaled else "nullptr",
        }
    return make_unit(
        "write",
        f"{k_format.name}_{v_format.name}_{key_dim}_{value_dim}",
        ("keys", "values", "targets", "flagged", *parts, "after"),
        ("written",),
        macros,
        {"Keys": k_format, "Values": v_format},
        ("rows",),
    )


def make_unit(
    kernel: str,
    suffix: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    macros: Mapping[str, int | str],
    formats: Mapping[str, PageFormat],
    shared: Sequence[str],
) -> KernelSource:
    helpers, body = read_source(kernel)
    files = dict.fromkeys(name for fmt in formats.values() for name in format_source(fmt.name).files)
    parts = ["".join(f"#define {name} {value}\n" for name, value in macros.items())]
    parts += [read_source(name)[0] for name in files]
    parts.append(
        "".join(f"typedef {format_source(fmt.name).struct} {name};\n" for name, fmt in formats.items())
    )
    parts += [read_source(name)[0] for name in shared]
    return KernelSource(
        name=f"octavo_{kernel}_{suffix}",
        input_names=tuple(inputs),
        output_names=tuple(outputs),
        header=strip_source("\n".join([*parts, helpers])),
        source=strip_source(body),
    )
