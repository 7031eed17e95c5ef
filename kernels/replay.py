"""Interface of pools whose steps can be captured as programs and replayed with new values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .metadata import Ints

if TYPE_CHECKING:
    import mlx.core as mx


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
