"""Steps of the parity probe: which tokens of which sequences, and where they lie in the probe's pages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from octavo.kernels.interface import PoolSpec
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata, StateMetadata

from .discover import CacheLayout

PAGE_SIZE = 8

Work = tuple[int, int, int]
"""A sequence, and its new positions [start, stop)."""

Floats = NDArray[np.float32]


def num_pages(length: int) -> int:
    return -(-length // PAGE_SIZE)


def probe_pool(layout: CacheLayout, *, num_sequences: int, longest: int) -> PoolSpec:
    """16-bit pages for so many sequences of up to ``longest`` positions, page 0 left out."""
    page_format = "bf16" if layout.dtype == mx.bfloat16 else "fp16"
    return PoolSpec(
        layers=layout.layers,
        num_pages=num_sequences * num_pages(longest) + 1,
        page_size=PAGE_SIZE,
        k_format=page_format,
        v_format=page_format,
    )


def step_metadata(work: Sequence[Work], *, num_sequences: int, longest: int) -> AttentionMetadata:
    """Pages of the sequences are interleaved, last page first, and page 0 is left out; slots come in
    falling order, and slot 0 is left out."""
    width = num_pages(longest)
    tables = (
        1
        + np.arange(width, dtype=np.int32)[::-1][None] * num_sequences
        + np.arange(num_sequences, dtype=np.int32)[:, None]
    )
    positions = np.concatenate([np.arange(start, stop, dtype=np.int32) for _, start, stop in work])
    owners = np.concatenate([np.full(stop - start, i) for i, start, stop in work])
    slots = tables[owners, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    q_start = list(itertools.accumulate((stop - start for _, start, stop in work), initial=0))
    return AttentionMetadata(
        positions=positions,
        q_start=np.array(q_start, np.int32),
        kv_len=np.array([stop for _, _, stop in work], np.int32),
        groups=(
            GroupMetadata(
                slots=slots.astype(np.int32), page_table=np.ascontiguousarray(tables[[i for i, _, _ in work]])
            ),
        ),
        page_size=PAGE_SIZE,
        states=StateMetadata(slots=np.array([num_sequences - i for i, _, _ in work], np.int32)),
    )
