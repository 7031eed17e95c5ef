"""From a model folder to a runner: finding caches, loading weights, checking results."""

from __future__ import annotations

from pathlib import Path

from ...api.config import EngineConfig
from ...memory.model_files import resolve_model
from ..base import ModelRunner
from .page_loss import ScoreText


def model_folder(config: EngineConfig) -> Path:
    """Return the model's folder, downloading it if necessary. Raises ModelLoadError if there is none."""
    return resolve_model(config.model, config.revision)


def load_runner(
    config: EngineConfig, *, is_draft: bool = False, score: ScoreText | None = None
) -> ModelRunner:
    """Load the model, check that it computes the same through pages, and allocate the pool.

    Call it on the thread that will run the steps: MLX streams are thread-local. ``score`` measures how well a
    runner predicts a short text. Its result decides ``kv_format="auto"``, or gives a warning about a lossy
    format. Raises ModelLoadError or InvalidConfig in one line, for example for a model without the head that
    ``speculate`` needs.
    """
    from .load import load_paged_runner  # imports MLX, which the control plane does not need

    return load_paged_runner(config, is_draft=is_draft, score=score)
