"""Attention over quantized and residual pages in float64 NumPy: what kernels are tested against."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..interface import LayerSpec
from ..metadata import AttentionMetadata
from ..residual import residual_starts
from .oracle import Float64s, StoredPart, dense_attention, sequence_slots

Parts = tuple[StoredPart, StoredPart]  # K and V


def attend_residual(
    pages: AttentionMetadata,
    residual: AttentionMetadata,
    stored: tuple[Parts, Parts],
    queries: NDArray[Any],
    *,
    layer: LayerSpec,
    beside: LayerSpec,
    mask: NDArray[Any] | None = None,
    **options: Any,
) -> Float64s:
    """Return attention over both kinds of pages, computed row by row.

    stored    every row of the sequences, quantized and as 16 bits, at the slots of ``pages`` and
              ``residual``, two metadata of one group
    layer     positions that a row sees; beside: positions that it reads from the residual pages
    options   options of ``dense_attention``
    """
    assert beside.window is not None
    starts = residual.only_group().starts
    if starts is None:
        starts = residual_starts(pages.positions, window=beside.window, page_size=pages.page_size)
    out = np.empty((*queries.shape[:2], layer.value_dim))
    for b, length in enumerate(pages.kv_len.tolist()):
        quantized, whole = (
            [part.read(sequence_slots(metadata, b, length)) for part in parts]
            for metadata, parts in zip((pages, residual), stored, strict=True)
        )
        seen = np.arange(length)
        for t in range(pages.q_start[b], pages.q_start[b + 1]):
            at = pages.positions[t : t + 1]
            in_16_bits = ((seen >= starts[t]) | (seen < beside.keep))[:, None, None]
            keys, values = (np.where(in_16_bits, *both) for both in zip(whole, quantized, strict=True))
            out[t : t + 1] = dense_attention(
                queries[t : t + 1],
                keys,
                values,
                at,
                window=layer.window,
                keep=layer.keep,
                mask=None if mask is None else mask[t : t + 1, :, :length],
                **options,
            )
    return out
