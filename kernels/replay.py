"""Interface of a KV cache for capturing a step once and replaying it with other values.

Decode steps repeat with the same shapes and other values. If a cache's part of the graph depends on the
step's metadata only through arrays, the graph can be kept as a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .metadata import Ints

if TYPE_CHECKING:
    import mlx.core as mx


class Program(Protocol):
    """A captured program; ``run`` computes its ``outputs`` for new values of its arrays."""

    @property
    def outputs(self) -> list[mx.array]: ...

    def run(self, values: Sequence[Ints]) -> None:
        """Run with new ``values`` of the filled arrays, in their order; one may fill several of them."""
        ...


class Programs(Protocol):
    """Captures programs that share memory, so that only one may run at a time."""

    def capture(
        self, filled: Sequence[mx.array], fixed: Sequence[mx.array], outputs: Sequence[mx.array]
    ) -> Program:
        """Capture a program that computes ``outputs``; ValueError names an operation that cannot be captured.
        ``filled``: int32 arrays that get new values in each run; ``fixed``: other inputs."""
        ...


class ReplayablePool(Protocol):
    """Pool of a KV cache whose steps, for given shapes, depend on the step only through arrays."""

    def step_values(self) -> list[Ints]:
        """Return the indices and flags of the current step, as NumPy arrays."""
        ...

    @property
    def step_shape(self) -> tuple[int, ...]:
        """Return a key that differs between steps whose ``step_values`` have different shapes."""
        ...

    def packed_values(self) -> list[Ints]:
        """Return ``step_values`` in as few arrays as possible, by joining several."""
        ...

    def step_inputs(self) -> list[mx.array]:
        """Return the step's values as MLX arrays, in that order, then the pages of every layer."""
        ...

    def bind_inputs(self, arrays: Sequence[mx.array]) -> None:
        """Compute with these arrays instead of ``step_inputs``."""
        ...

    def pending(self) -> list[mx.array]: ...

    def bind_pending(self, arrays: Sequence[mx.array]) -> None:
        """Use a replayed graph's outputs instead of ``pending()``."""
        ...

    def programs(self) -> Programs:
        """Capture of programs for the steps of one model."""
        ...
