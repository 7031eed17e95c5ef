"""Interface of a KV cache for capturing a step once and running it again with other values.

Steps of decodes repeat: the same shapes, other numbers in them. Where everything that a cache's part of
a step takes from its metadata reaches the graph through arrays, the graph can be kept as a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .metadata import Ints

if TYPE_CHECKING:
    import mlx.core as mx


class Program(Protocol):
    """``run`` computes ``outputs`` of the values of the arrays it was captured with."""

    @property
    def outputs(self) -> list[mx.array]: ...

    def run(self, values: Sequence[Ints]) -> None:
        """``values``: of the filled arrays in their order, each for one or several of them."""
        ...


class Programs(Protocol):
    """Captures programs that never run at the same time: they share memory."""

    def capture(
        self, filled: Sequence[mx.array], fixed: Sequence[mx.array], outputs: Sequence[mx.array]
    ) -> Program:
        """Capture a program that computes ``outputs`` from int32 arrays that are ``filled`` in each run and
        ``fixed`` ones; ValueError names what cannot be captured."""
        ...


class ReplayablePool(Protocol):
    """Pool of a KV cache whose steps depend on arrays only, once their shapes are given."""

    def step_values(self) -> list[Ints]:
        """The indices and flags of the step that has begun, where NumPy holds them."""
        ...

    @property
    def step_shape(self) -> tuple[int, ...]:
        """Return a key that differs between steps whose ``step_values`` have different shapes."""
        ...

    def packed_values(self) -> list[Ints]:
        """``step_values`` in as few arrays as it may be: each for one of them, or for several, one after the
        other."""
        ...

    def step_inputs(self) -> list[mx.array]:
        """Return the step's values as MLX arrays, in that order, then the pages of every layer."""
        ...

    def bind_inputs(self, arrays: Sequence[mx.array]) -> None:
        """Compute with these in their place."""
        ...

    def pending(self) -> list[mx.array]: ...

    def bind_pending(self, arrays: Sequence[mx.array]) -> None:
        """Bind the arrays that a replayed graph gave in the place of ``pending()``."""
        ...

    def programs(self) -> Programs:
        """Capture of programs for the steps of one model."""
        ...
