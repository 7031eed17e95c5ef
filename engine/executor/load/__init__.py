"""From a folder to a model ready to serve: finding layers, loading weights, probing parity."""

from __future__ import annotations

from ...api.config import EngineConfig
from ..base import ModelRunner


def load_runner(config: EngineConfig, *, is_draft: bool = False) -> ModelRunner:
    """Load the model, prove that it computes the same through pages, allocate the pool.

    Call it on the thread that will run the steps: MLX streams are thread-local.
    Raises ModelLoadError or InvalidConfig with one clear line, such as for a model without the head that
    ``speculate`` asks for.
    """
    from .load import load_paged_runner  # with MLX, which the control plane does without

    return load_paged_runner(config, is_draft=is_draft)
