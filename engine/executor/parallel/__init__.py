"""Several processes (ranks) that compute one model.

In tensor parallel, each has a part of every layer's heads and columns; in pipeline parallel, some of the
layers. Rank 0 has the scheduler, the page tables, sampling and the servers. It sends each step's ``Batch``
to the other ranks.
"""

from __future__ import annotations

from ...api.config import EngineConfig
from ..base import ModelRunner


def load_ranks(config: EngineConfig) -> ModelRunner:
    """Load the model in ``config.num_ranks`` processes, this process as rank 0."""
    from .runner import load_leading_runner  # imports MLX

    return load_leading_runner(config)
