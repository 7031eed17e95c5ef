"""What computes a recurrence for all segments of a step at once, where there is something that can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module

from octavo.kernels.replay import Programs
from octavo.kernels.state_segments import StateSegments

if TYPE_CHECKING:
    from .segments import StateStep


@dataclass(frozen=True, slots=True)
class Entry:
    """The state that a kernel keeps in each slot."""

    shape: tuple[int, ...]
    dtype: mx.Dtype


@dataclass(frozen=True, slots=True)
class Advance:
    """``run(pool, arrays)`` gives the pool's new handle and y of all rows; ``finish`` makes of y what
    mlx-lm's function would have returned."""

    entry: Entry
    run: Callable[[mx.array, Any], tuple[mx.array, mx.array]]
    finish: Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class StateCapture:
    """``programs`` record what kernels do; ``bind`` makes what they take for a step's segments of int32
    arrays [B, 4] and [C, 2], as in ``StateSegments``."""

    programs: Programs
    bind: Callable[[Sequence[mx.array]], Any]


class Recurrences(Protocol):
    """Kernels for cut points; None where none fits the arguments."""

    def arrays(self, segments: StateSegments) -> Any:
        """The segments of a step as its kernels take them."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """A pool of states [num_slots, ..] in memory that suits its kernels."""
        ...

    def mark(self, flags: mx.array, arrays: Any, y: mx.array, step: StateStep) -> mx.array:
        """``flags`` int32 [T], no longer 0 where a state is NaN or infinite that a step leaves somewhere, by
        what it gave for its row of y [T, ..]."""
        ...

    def state_capture(self) -> StateCapture | None:
        """What records steps as programs; None where nothing does."""
        ...

    def function(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Advance | None:
        """For a call of mlx-lm's function, rows [1, T, ..]."""
        ...

    def child(self, module: Module, rows: mx.array) -> Advance | None:
        """For a call of one of ``CHILDREN``, over rows [1, T, C]."""
        ...

    def conv(self, module: Any, rows: mx.array) -> Advance | None:
        """For a depthwise convolution over rows [T, C], without those before them."""
        ...

    def taps(self, rows: mx.array, weight: mx.array) -> Advance | None:
        """For sums of each row of [T, C] and those before it, times weights [K, C], the row's own last."""
        ...

    def rows_behind(self, window: mx.array, keep: int) -> mx.array:
        """[T, C] of a window [1, keep + T, C] that model code has put together."""
        ...
