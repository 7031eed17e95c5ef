"""Groups of layers that share page tables. Imports no MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .interface import LayerSpec
from .residual import ResidualSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share one pool of pages."""

    window: int | None
    keep: int
    members: tuple[int, ...]
    chunked: bool = False

    @property
    def chunk(self) -> int | None:
        """Length of a chunk in positions, for chunked attention; otherwise None."""
        return self.window if self.chunked else None


def without_unreached_windows(layers: Sequence[LayerSpec], max_model_len: int) -> tuple[LayerSpec, ...]:
    """Return the layers, with full attention instead of windows of ``max_model_len`` or more positions."""
    return tuple(
        layer
        if layer.window is None or layer.window < max_model_len
        else replace(layer, window=None, keep=0, chunked=False)
        for layer in layers
    )


def group_layers(layers: Sequence[LayerSpec], max_model_len: int) -> tuple[LayerGroup, ...]:
    """Group layers by the positions that their queries see.

    Full attention comes first, then windows, the smallest last.
    """
    members: dict[tuple[int | None, int, bool], list[int]] = {}
    for index, layer in enumerate(without_unreached_windows(layers, max_model_len)):
        kind = (layer.window, layer.keep, layer.chunked) if layer.window is not None else (None, 0, False)
        members.setdefault(kind, []).append(index)
    kinds = sorted(members, key=lambda kind: (kind[0] is not None, -(kind[0] or 0), -kind[1], kind[2]))
    return tuple(
        LayerGroup(window=kind[0], keep=kind[1], chunked=kind[2], members=tuple(members[kind]))
        for kind in kinds
    )


def residual_groups(
    groups: Sequence[LayerGroup], spec: ResidualSpec, page_size: int
) -> tuple[LayerGroup, ...]:
    """Return the groups of 16-bit residual pages, with their window and kept positions."""
    window = spec.window(page_size)
    return tuple(
        replace(group, window=window, keep=spec.sink_positions(page_size))
        if group.window is None
        else replace(group, window=min(window, group.window))
        for group in groups
    )
