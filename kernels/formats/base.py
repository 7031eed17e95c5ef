from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .rotation import hadamard

Floats = NDArray[np.float32]
Array = NDArray[Any]
Bools = NDArray[np.bool_]

MAX_FP16 = np.float32(65504)
"""Largest finite fp16 value; scales are clamped to it."""


class PageFormat(ABC):
    """Storage format of rows. A *row* is one position of one KV head: ``head_dim`` values of K or of V.

    A stored row has ``codes`` [..., codes_per_row] of ``code_dtype`` and ``scales`` [..., scales_per_row] of
    ``scale_dtype``. In a page, all codes of a head come first, then all its scales.

    code_bits   bits of the code of one value
    multiple    a row must have a multiple of this many values
    rotates     whether rows are stored after a Hadamard rotation

    To add a format, put a subclass with ``@register`` into a file of this folder.
    """

    name: ClassVar[str]
    code_dtype: ClassVar[type[np.generic]] = np.uint32
    scale_dtype: ClassVar[type[np.generic]] = np.float16
    code_bits: ClassVar[int]
    multiple: ClassVar[int] = 8
    rotates: ClassVar[bool] = False

    def codes_per_row(self, head_dim: int) -> int:
        """Return how many codes a row has; ValueError if the format cannot store rows of this length."""
        if head_dim < 1 or head_dim % self.multiple:
            raise ValueError(
                f"{self.name} packs rows of a multiple of {self.multiple} values, got head_dim {head_dim}; "
                "use bf16 pages"
            )
        return head_dim * self.code_bits // (8 * np.dtype(self.code_dtype).itemsize)

    def scales_per_row(self, head_dim: int) -> int:  # noqa: ARG002
        """Return the number of elements in a row's ``scales``; 0 for a format without scales."""
        return 1

    @abstractmethod
    def encode(self, rows: Floats) -> tuple[Array, Array, Bools]:
        """Return codes, scales and a mask ``storable`` [...] of float32 rows.

        A row is not storable if it has NaN, infinity or a value out of range; its codes and scales are then
        0.
        """

    @abstractmethod
    def dequantize(self, codes: Array, scales: Array) -> Floats:
        """Return the float32 values [..., head_dim] of stored codes and scales."""

    def row_bytes(self, head_dim: int) -> int:
        codes = self.codes_per_row(head_dim) * np.dtype(self.code_dtype).itemsize
        return codes + self.scales_per_row(head_dim) * np.dtype(self.scale_dtype).itemsize

    def page_bytes(self, head_dim: int, *, page_size: int, num_kv_heads: int) -> int:
        """Return the bytes of one page of one layer, for K alone or for V alone."""
        return num_kv_heads * page_size * self.row_bytes(head_dim)

    def quantize(self, rows: ArrayLike) -> tuple[Array, Array]:
        """Return codes and scales of rows [..., head_dim], without rotation.

        Raises ValueError for NaN, infinity, or a magnitude that the format cannot store.
        """
        values = np.asarray(rows, dtype=np.float32)
        self._check_rows(values)
        codes, scales, storable = self.encode(values)
        if not storable.all():
            row = tuple(int(i) for i in np.argwhere(~storable)[0])
            worst = values[row][~np.isfinite(values[row])]
            value = worst[0] if worst.size else np.abs(values[row]).max()
            raise ValueError(
                f"row {row} holds {value}: {self.name} pages store finite values only; "
                "find the layer that produced it, or use a format of wider range"
            )
        return codes, scales

    def store(self, rows: ArrayLike) -> tuple[Array, Array, Bools]:
        """Return codes, scales and ``storable`` of rows [..., head_dim], rotated if the format rotates."""
        values = np.asarray(rows, dtype=np.float32)
        self._check_rows(values)
        with np.errstate(invalid="ignore", over="ignore"):
            return self.encode(hadamard(values) if self.rotates else values)

    def restore(self, codes: Array, scales: Array) -> Floats:
        """Return the rows of codes and scales from ``store``, dequantized and rotated back."""
        rows = self.dequantize(codes, scales)
        return hadamard(rows) if self.rotates else rows

    def _check_rows(self, rows: Floats) -> None:
        if rows.ndim == 0:
            raise ValueError("rows must have shape [..., head_dim], got a scalar")
        self.codes_per_row(rows.shape[-1])

    def _check_stored(self, codes: Array, scales: Array) -> int:
        head_dim: int = codes.shape[-1] * 8 * np.dtype(self.code_dtype).itemsize // self.code_bits
        want = (*codes.shape[:-1], self.scales_per_row(head_dim))
        if codes.dtype != self.code_dtype or scales.dtype != self.scale_dtype or scales.shape != want:
            raise ValueError(
                f"{self.name} stores {np.dtype(self.code_dtype)} codes and {np.dtype(self.scale_dtype)} "
                f"scales {want}, got {codes.dtype} {codes.shape} and {scales.dtype} {scales.shape}"
            )
        return head_dim


def zero_nonfinite(rows: Floats) -> tuple[Floats, Bools]:
    finite: Bools = np.asarray(np.isfinite(rows).all(-1))
    return np.where(finite[..., None], rows, np.float32(0)), finite


FORMATS: dict[str, PageFormat] = {}
"""All page formats by name."""

Format = TypeVar("Format", bound=type[PageFormat])


def register(format_class: Format) -> Format:
    assert format_class.name not in FORMATS, f"two page formats are called {format_class.name!r}"
    FORMATS[format_class.name] = format_class()
    return format_class


@dataclass(frozen=True, slots=True)
class FormatPair:
    k: str
    v: str

    def __str__(self) -> str:
        return self.k if self.k == self.v else f"{self.k}/{self.v}"


RECIPE = "fp5/fp4"
"""The smallest formats with which models were measured to answer as well as with 16-bit pages; two residual
pages, the default, are needed for that (docs/benchmarks/results)."""


def format_pair(name: str) -> FormatPair:
    """Return the formats of ``name``: a format for both K and V, or "K/V"."""
    k, _, v = name.partition("/")
    return FormatPair(k, v or k)
