"""Latent attention (MLA) through pages, from the two halves of the cache in mlx-lm's models.

A layer caches a latent [T, 1, 1, R] as K and a rotary key [T, 1, 1, P] as V. With one token per row, model
code absorbs the projections into its queries, multiplies rotary queries with the rotary keys, and passes the
products to attention as a mask over the latents, which are K and V::

    scores = (q_pe * scale) @ k_pe.swapaxes(-1, -2)
    scaled_dot_product_attention(q, latent, latent, scale=scale, mask=scores)

Here the products are never stored: both kinds of queries go to the kernels, which read latents and keys from
their pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from .cache_adapter import LayerCache


@dataclass(frozen=True, slots=True)
class RotaryScores:
    """Product of scaled rotary queries [T, Hq, 1, P] with a layer's rotary keys, not yet computed."""

    shim: LayerCache
    queries: mx.array


class RotaryKeys(mx.array):
    """A layer's rotary keys, transposed; without values. Its class derives from an array, so that Python
    calls its method for ``queries @ keys``."""

    def __init__(self, shim: LayerCache) -> None:
        super().__init__(0.0)
        self._shim = shim

    def __rmatmul__(self, queries: mx.array) -> RotaryScores:  # type: ignore[misc]
        return RotaryScores(self._shim, queries)
