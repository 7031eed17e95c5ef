"""Latent attention (MLA) through pages: what mlx-lm's models compute with the two halves of their cache.

A layer caches a latent [T, 1, 1, R] as K and a rotary key [T, 1, 1, P] as V. At one token per row model code
absorbs the projections into its queries, multiplies rotary queries with the rotary keys, and gives the
products to attention as a mask over the latents, which are K and V::

    scores = (q_pe * scale) @ k_pe.swapaxes(-1, -2)
    scaled_dot_product_attention(q, latent, latent, scale=scale, mask=scores)

Here neither product exists: both queries reach the kernels, which read latents and keys from their pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from .cache_adapter import LayerCache


@dataclass(frozen=True, slots=True)
class RotaryScores:
    """Dot products of rotary queries [T, Hq, 1, P], scaled, with a layer's rotary keys."""

    shim: LayerCache
    queries: mx.array


class RotaryKeys(mx.array):
    """A layer's rotary keys, transposed. An array by its class only, so that Python asks it first what
    ``queries @ keys`` is; it has no values."""

    def __init__(self, shim: LayerCache) -> None:
        super().__init__(0.0)
        self._shim = shim

    def __rmatmul__(self, queries: mx.array) -> RotaryScores:  # type: ignore[misc]
        return RotaryScores(self._shim, queries)
