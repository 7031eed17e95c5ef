"""Observation of a model's caches without reading its weights, for planning."""

from __future__ import annotations

from pathlib import Path

from ...api.config import StateSnapshots
from ...memory.planner import ObservedCaches
from ..adapters.layers import num_values
from ..recurrent.snapshot_store import snapshot_bytes
from .discover import discover_layout
from .loader import load_model


def observe_caches(path: Path, form: StateSnapshots = "full") -> ObservedCaches:
    """Of the model in a folder: it is loaded, and forwards of it are built and never evaluated. ``form``: as
    snapshots of its states are kept.

    Raises ModelLoadError for models that cannot be served.
    """
    loaded = load_model(path, weights="keep")
    layout = discover_layout(loaded.model, loaded.architecture)
    entries = {str(index): entry for index, entry in enumerate(layout.entries)}
    return ObservedCaches(
        layout.layers, layout.slot_bytes, snapshot_bytes(entries, form), num_values(loaded.model)
    )
