"""Observation of a model's caches without reading its weights, for planning."""

from __future__ import annotations

from pathlib import Path

from ...memory.planner import ObservedCaches
from ..adapters.layers import num_values
from .discover import discover_layout
from .loader import load_model


def observe_caches(path: Path) -> ObservedCaches:
    """Return the observed caches of a model folder; forwards are built but never evaluated. Raises
    ModelLoadError for models that cannot be served."""
    loaded = load_model(path, weights="keep")
    layout = discover_layout(loaded.model, loaded.architecture)
    return ObservedCaches(layout.layers, layout.slot_bytes, num_values(loaded.model))
