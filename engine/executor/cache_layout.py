"""Layout of a model's caches: attention layers, recurrent states, and their shapes."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from octavo.kernels.interface import LayerSpec

from .recurrent.entries import EntrySpec
from .recurrent.mixers import Mixer


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """Entry of the model's cache list that holds K and V."""

    layer: int


@dataclass(frozen=True, slots=True)
class StateCache:
    """Cache of recurrent states with ``size`` entries."""

    index: int
    size: int


CachePlace = AttentionCache | StateCache | tuple["CachePlace", ...] | None
"""Entry of a model's cache list; None if the model never writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Caches of a model, as observed during a forward.

    layers      attention layers in order of their pool index
    caches      kind of each entry in the model's cache list
    dtype       dtype of K
    vocab_size  width of the logits
    mixers      modules with recurrent states, if any
    entries     state arrays of one sequence, with the largest observed shapes and dtypes
    """

    layers: tuple[LayerSpec, ...]
    caches: tuple[CachePlace, ...]
    dtype: mx.Dtype
    vocab_size: int
    mixers: tuple[Mixer, ...] = ()
    entries: tuple[EntrySpec, ...] = ()

    @property
    def slot_bytes(self) -> int:
        """Bytes of the recurrent states of one sequence, in all layers."""
        return sum(entry.nbytes for entry in self.entries)
