from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .mixers import MixerError


@dataclass(frozen=True, slots=True)
class EntrySpec:
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.size


def slot_bytes(entries: Mapping[str, EntrySpec]) -> int:
    return sum(entry.nbytes for entry in entries.values())


def bytes_of(array: mx.array) -> Any:
    """Return an evaluated contiguous array [N, ..] as uint8 [N, bytes]."""
    return np.asarray(array.reshape(array.shape[0], -1).view(mx.uint8))


def fitting(value: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Return states [B, *shape], padded in front with zeros. Raises MixerError."""
    if value.shape[1:] == shape:
        return value
    if value.ndim != len(shape) + 1 or any(a > b for a, b in zip(value.shape[1:], shape, strict=True)):
        raise MixerError(f"a state of shape {value.shape[1:]} where slots have room for {shape}")
    widths = [(0, 0), *((b - a, 0) for a, b in zip(value.shape[1:], shape, strict=True))]
    return mx.pad(value, widths)
