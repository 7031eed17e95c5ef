"""Cache layouts: which layers of a model attend, which keep states, and their shapes."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from octavo.kernels.interface import LayerSpec

from .recurrent.entries import EntrySpec
from .recurrent.mixers import Mixer


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """An entry of the model's cache list that holds K and V; ``layer``: index in ``CacheLayout.layers``."""

    layer: int


@dataclass(frozen=True, slots=True)
class StateCache:
    """A cache of recurrent states with ``size`` entries, the ``index``-th of its kind."""

    index: int
    size: int


CachePlace = AttentionCache | StateCache | tuple["CachePlace", ...] | None
"""Entry of a model's cache list: a tuple for several caches in one entry, None if the model never writes
it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Caches of a model, as observed during a forward.

    layers      attention layers in order of their pool index
    caches      kind of each entry in the model's cache list
    dtype       dtype of K
    vocab_size  width of the logits
    mixers      modules that touch recurrent states; none in models with attention alone
    entries     state arrays of one sequence, in the widest observed form
    """

    layers: tuple[LayerSpec, ...]
    caches: tuple[CachePlace, ...]
    dtype: mx.Dtype
    vocab_size: int
    mixers: tuple[Mixer, ...] = ()
    entries: tuple[EntrySpec, ...] = ()

    @property
    def slot_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence, in all layers; 0 without any."""
        return sum(entry.nbytes for entry in self.entries)
