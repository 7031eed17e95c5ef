"""Interface to capture a step of a KV cache as a program and replay it.

Decode steps repeat with equal shapes and new values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .metadata import Ints

if TYPE_CHECKING:
    import mlx.core as mx


class Program(Protocol):
    @property
    def outputs(self) -> list[mx.array]: ...

    def run(self, values: Sequence[Ints]) -> None:
        """Run with new ``values`` of the ``filled`` arrays, in order."""
        ...


class Programs(Protocol):
    """Captures programs that share memory, so that only one may run at a time."""

    def capture(
        self, filled: Sequence[mx.array], fixed: Sequence[mx.array], outputs: Sequence[mx.array]
    ) -> Program:
        """Capture a program that computes ``outputs``.

        filled   int32 arrays that get new values in each run

        Raises ValueError that names an operation it cannot capture.
        """
        ...


class ReplayablePool(Protocol):
    """Pool of a KV cache with steps that can be replayed."""

    def step_values(self) -> list[Ints]: ...

    @property
    def step_shape(self) -> tuple[int, ...]:
        """Return a key that differs between steps whose ``step_values`` have different shapes."""
        ...

    def packed_values(self) -> list[Ints]: ...

    def step_inputs(self) -> list[mx.array]:
        """Return ``step_values`` as MLX arrays, followed by the page arrays of every layer."""
        ...

    def bind_inputs(self, arrays: Sequence[mx.array]) -> None: ...

    def pending(self) -> list[mx.array]: ...

    def bind_pending(self, arrays: Sequence[mx.array]) -> None: ...

    def programs(self) -> Programs:
        """Return an object that captures the steps of one model as programs."""
        ...
