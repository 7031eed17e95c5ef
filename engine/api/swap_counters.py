"""Counters of pages that were copied out of the pool for preempted sequences, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCounts:
    """Pages since the start: ``num_out`` of the pool, ``num_in`` again; and what copies take now."""

    num_out: int = 0
    num_in: int = 0
    num_bytes: int = 0
