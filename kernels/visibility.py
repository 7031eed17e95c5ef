"""Visibility: a query sees the last ``window`` positions, its own included, and the first ``keep``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .metadata import Ints

if TYPE_CHECKING:
    import mlx.core as mx


def window_start(positions: Ints | int, window: Ints | int) -> Ints:
    """Return the first position, apart from kept ones, that queries at ``positions`` see."""
    return np.maximum(positions - window + 1, 0)


def visible(
    queries: mx.array, keys: mx.array, window: int | None, keep: int, last: mx.array | None = None
) -> mx.array:
    """Return a bool array that tells which keys each query sees.

    queries, keys   positions, broadcast
    last            last position that each query sees (None: its own)
    """
    causal = keys <= (queries if last is None else last)
    return causal if window is None else causal & ((keys > queries - window) | (keys < keep))
