"""From a folder to a model ready to serve: finding layers, loading weights, probing parity."""

from __future__ import annotations

from pathlib import Path

from ...api.config import EngineConfig
from ...memory.model_files import resolve_model
from ..base import ModelRunner
from .page_loss import ScoreText


def model_folder(config: EngineConfig) -> Path:
    """Return the folder of the model, downloaded if it must be; ModelLoadError if there is none."""
    return resolve_model(config.model, config.revision)


def load_runner(
    config: EngineConfig, *, is_draft: bool = False, score: ScoreText | None = None
) -> ModelRunner:
    """Load the model, prove that it computes the same through pages, allocate the pool.

    Call it on the thread that will run the steps: MLX streams are thread-local. ``score`` says how runners
    predict a short text: by it a page format is chosen (``kv_format="auto"``) or warned of.
    Raises ModelLoadError or InvalidConfig with one clear line, such as for a model without the head that
    ``speculate`` asks for.
    """
    from .load import load_paged_runner  # with MLX, which the control plane does without

    return load_paged_runner(config, is_draft=is_draft, score=score)
