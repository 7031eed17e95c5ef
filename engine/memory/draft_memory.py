"""Memory of a draft model, or of a model's head for multi-token prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.kernels.interface import LayerSpec

from ..api.config import EngineConfig
from .budget import weights_bytes
from .model_files import model_length, read_config, resolve_model
from .sizing import head_layer, sizing
from .state_sizing import draft_state_bytes


@dataclass(frozen=True, slots=True)
class ObservedCaches:
    """Observed caches of a model. ``slot_bytes`` is the size of one sequence's recurrent state."""

    layers: tuple[LayerSpec, ...]
    slot_bytes: int = 0
    adapter_values: int = 0


@dataclass(frozen=True, slots=True)
class DraftMemory:
    weights: int = 0
    states: int = 0
    layers: tuple[LayerSpec, ...] = ()
    max_model_len: int = 1

    def page_bytes(self, config: EngineConfig) -> Callable[[int], int]:
        """Return the bytes of pages and states next to each number of pages of the target."""
        if not self.layers:
            return lambda _: self.states
        plain = replace(config.without_residual(), max_pinned_pages=0)
        size = sizing(self.layers, plain, self.max_model_len)
        return lambda num_pages: size.own_bytes_for(num_pages) + self.states


def draft_memory(
    config: EngineConfig, layers: Sequence[LayerSpec], observe: Callable[[Path], ObservedCaches]
) -> DraftMemory:
    """Return the memory of what ``config.speculate`` loads; ``layers`` are the target's."""
    if config.draft_model is not None:
        path = resolve_model(config.draft_model)
        observed = observe(path)
        states = draft_state_bytes(config, observed.slot_bytes)
        length = model_length(read_config(path), None)
        return DraftMemory(weights_bytes(path), states, observed.layers, length)
    if config.speculate == "mtp" and layers:
        return DraftMemory(layers=(replace(head_layer(layers), window=None),))
    return DraftMemory()
