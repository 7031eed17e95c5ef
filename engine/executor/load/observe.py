"""Observation of a model's caches without reading its weights, for planning."""

from __future__ import annotations

from pathlib import Path

from ...memory.planner import ObservedCaches
from ..adapters.layers import num_values
from .discover import discover_layout
from .loader import load_model


def observe_caches(path: Path) -> ObservedCaches:
    """Of the model in a folder: it is loaded, and forwards of it are built and never evaluated.

    Raises ModelLoadError for models that cannot be served.
    """
    loaded = load_model(path, weights="keep")
    layout = discover_layout(loaded.model, loaded.architecture)
    return ObservedCaches(layout.layers, layout.slot_bytes, num_values(loaded.model))
