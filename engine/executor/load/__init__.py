"""Loading of a model: caches, weights, and a check of its results."""

from __future__ import annotations

from pathlib import Path

from ...api.config import EngineConfig
from ...memory.model_files import resolve_model
from ..base import ModelRunner
from .page_loss import ScoreText


def model_folder(config: EngineConfig) -> Path:
    """Return the model's folder, downloading it if necessary. Raises ModelLoadError."""
    return resolve_model(config.model, config.revision)


def load_runner(
    config: EngineConfig, *, is_draft: bool = False, score: ScoreText | None = None
) -> ModelRunner:
    """Load the model, check its results, and allocate the page pool.

    Call it on the thread that will run the steps, because MLX streams are thread-local.
    Raises ModelLoadError or InvalidConfig.
    """
    from .load import load_paged_runner  # imports MLX

    return load_paged_runner(config, is_draft=is_draft, score=score)
