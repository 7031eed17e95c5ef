"""The residual window: positions that queries read from 16-bit pages instead of quantized ones.

Every row is written twice: quantized in its page, and in 16 bits in a residual page, which is released when
no later query reads it::

    page         0     1     2     3     4     5          a query in page 5, sink_pages = residual_pages = 1
    residual    16b    -     -     -     -    16b         its reads from residual pages ...
    quantized    .     q     q     q     q     .          ... and from quantized pages

The pages that a query reads depend on its position alone, so pages can be shared and recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from .formats import page_format
from .interface import LayerSpec, PoolSpec
from .metadata import Ints
from .visibility import window_start

SIXTEEN_BITS = ("bf16", "fp16")
DEFAULT_RESIDUAL_PAGES = 2
_COARSE_BITS = 5  # per value, scales included


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualSpec:
    """Pages of a sequence that queries read in 16 bits instead of quantized.

    sink_pages       number of first pages (attention sinks)
    residual_pages   number of last pages, including the page being written
    quantize_after   queries before this position read only 16-bit pages
    """

    sink_pages: int = 0
    residual_pages: int = 1
    quantize_after: int = 0

    def window(self, page_size: int) -> int:
        """Return the fewest positions that a query reads in 16 bits, counting its own."""
        return (self.residual_pages - 1) * page_size + 1

    def sink_positions(self, page_size: int) -> int:
        """Return the number of positions at a sequence's start that every query reads in 16 bits."""
        return self.sink_pages * page_size


RESIDUAL_SETTINGS = tuple(field.name for field in fields(ResidualSpec))


def default_residual_pages(*formats: str) -> int:
    """Return the default of ``residual_pages`` for these formats of K and V.

    It is two if a format stores a value in five bits or less, else 0.
    """
    dim = 128
    coarse = any(8 * page_format(name).row_bytes(dim) <= _COARSE_BITS * dim for name in formats)
    return DEFAULT_RESIDUAL_PAGES if coarse else 0


def check_residual(spec: PoolSpec, residual: PoolSpec) -> None:
    """Raise ValueError unless ``residual`` is a valid specification of the residual pages of ``spec``."""
    for name in (residual.k_format, residual.v_format):
        if name not in SIXTEEN_BITS:
            raise ValueError(
                f"residual pages must be of a 16-bit format ({', '.join(SIXTEEN_BITS)}), got {name}"
            )
    if residual.page_size != spec.page_size or len(residual.layers) != len(spec.layers):
        raise ValueError("residual pages must have the layers and the page size of the quantized pages")
    for layer, own in zip(spec.layers, residual.layers, strict=True):
        if _shape(layer) != _shape(own):
            raise ValueError(
                f"residual pages must have rows of {_shape(layer)} (heads, K, V), got {_shape(own)}"
            )
        if own.window != residual.layers[0].window:
            raise ValueError("layers that share residual pages must have one window, got several")
        if own.window is None or (layer.window is not None and (own.window > layer.window)):
            raise ValueError(
                f"residual pages must have a window of at most the layer's {layer.window}, got {own.window}"
            )
        if layer.window is not None and own.keep != layer.keep:
            raise ValueError(
                f"residual pages of a layer with a window must have its keep of {layer.keep}, got {own.keep}"
            )


def _shape(layer: LayerSpec) -> tuple[int, int, int]:
    return layer.num_kv_heads, layer.head_dim, layer.value_dim


def residual_starts(positions: Ints, *, window: int | Ints, page_size: int) -> Ints:
    """Return the first position that queries at ``positions`` read from residual pages."""
    return (window_start(positions, window) // page_size * page_size).astype(np.int32)
