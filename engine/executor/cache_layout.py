from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from octavo.kernels.interface import LayerSpec

from .recurrent.entries import EntrySpec
from .recurrent.mixers import Mixer


@dataclass(frozen=True, slots=True)
class AttentionCache:
    layer: int


@dataclass(frozen=True, slots=True)
class StateCache:
    index: int
    size: int


CachePlace = AttentionCache | StateCache | tuple["CachePlace", ...] | None
"""Entry of a model's cache list; None if the model never writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Caches of a model, as observed during a forward."""

    layers: tuple[LayerSpec, ...]
    caches: tuple[CachePlace, ...]
    dtype: mx.Dtype
    vocab_size: int
    mixers: tuple[Mixer, ...] = ()
    entries: tuple[EntrySpec, ...] = ()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's recurrent states in all layers."""
        return sum(entry.nbytes for entry in self.entries)
