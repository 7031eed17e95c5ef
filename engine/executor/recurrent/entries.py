"""The arrays of a state: shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np


@dataclass(frozen=True, slots=True)
class EntrySpec:
    """One state array of a slot: the widest that the model writes."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.size


def slot_bytes(entries: Mapping[str, EntrySpec]) -> int:
    return sum(entry.nbytes for entry in entries.values())
