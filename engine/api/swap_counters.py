"""Counters of pages that were copied out of the pool for preempted sequences, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCounts:
    """Pages copied out of the pool and back since the start, and the bytes of copies now."""

    num_out: int = 0
    num_in: int = 0
    num_bytes: int = 0
