"""Inputs of a step's rows besides tokens and positions, for modules of the model that read them."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

_NONE: Mapping[str, mx.array] = {}


class RowInputs:
    """The named inputs of the step whose graph is being built.

    Adapted modules of a model and its ``PagedModel`` share this object. If the step's ``Batch.inputs`` lacks
    a name, the module that reads it computes as the unadapted model does.
    """

    def __init__(self) -> None:
        self.arrays = _NONE

    def get(self, name: str) -> mx.array | None:
        """The array [T, ...] of that name; None in a step without it."""
        return self.arrays.get(name)

    def clear(self) -> None:
        """End the step: the inputs must not keep graphs in memory."""
        self.arrays = _NONE
