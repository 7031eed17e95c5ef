"""Inputs of a step's rows besides tokens and positions, for modules of the model that read them."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

_NONE: Mapping[str, mx.array] = {}


class RowInputs:
    """The named inputs of the step whose graph is being built.

    Whoever changes modules of a model gives them this object, and ``PagedModel`` the same one. A name that
    the step's ``Batch.inputs`` does not have is missing, and the module computes what the model does.
    """

    def __init__(self) -> None:
        self.arrays = _NONE

    def get(self, name: str) -> mx.array | None:
        """The array [T, ...] of that name; None in a step without it."""
        return self.arrays.get(name)

    def clear(self) -> None:
        """End the step: graphs are not kept alive by their inputs."""
        self.arrays = _NONE
