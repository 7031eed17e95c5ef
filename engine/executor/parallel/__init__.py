"""Tensor parallel: several processes (ranks), each with a part of every layer's heads and columns.

Rank 0 has the scheduler, the page tables, sampling and the servers. It sends each step's ``Batch`` to the
other ranks.
"""

from __future__ import annotations

from ...api.config import EngineConfig
from ..base import ModelRunner


def load_ranks(config: EngineConfig) -> ModelRunner:
    """Load the model in ``config.tensor_parallel`` processes, this process as rank 0."""
    from .runner import load_leading_runner  # imports MLX

    return load_leading_runner(config)
