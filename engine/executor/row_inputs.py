"""Inputs of a step's rows besides tokens and positions."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

_NONE: Mapping[str, mx.array] = {}


class RowInputs:
    """Named inputs of a step's rows."""

    def __init__(self) -> None:
        self.arrays = _NONE

    def get(self, name: str) -> mx.array | None:
        """Return the array [T, ...] of this name, if the step has it."""
        return self.arrays.get(name)

    def clear(self) -> None:
        self.arrays = _NONE
