"""One call for every kernel, whoever compiles it.

``compile_kernel`` is ``mx.fast.metal_kernel`` or anything with its parameters; what it returns is
called as MLX's kernels are, and gives MLX arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .units import MIN_ELEMENTS, Unit


class CompileKernel(Protocol):
    """``mx.fast.metal_kernel``, as far as it is used here."""

    def __call__(
        self,
        *,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
    ) -> Callable[..., Sequence[mx.array]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Threads, not threadgroups, in ``grid``: whole multiples of ``threadgroup`` here."""

    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    outputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...]


def _metal_kernel(**parts: Any) -> Callable[..., Sequence[mx.array]]:
    return cast(Callable[..., Sequence[mx.array]], mx.fast.metal_kernel(**parts))


@dataclass(slots=True)
class KernelLibrary:
    """Compiled units by name."""

    compile_kernel: CompileKernel = _metal_kernel
    _units: dict[str, Unit] = field(default_factory=dict)
    _compiled: dict[str, Callable[..., Sequence[mx.array]]] = field(default_factory=dict)

    def run(self, unit: Unit, inputs: dict[str, mx.array], launch: Launch) -> list[mx.array]:
        """Launch ``unit``; ``inputs`` by name, outputs in the unit's order."""
        if unit.name not in self._compiled:
            self._compiled[unit.name] = self.compile_kernel(
                name=unit.name,
                input_names=list(unit.input_names),
                output_names=list(unit.output_names),
                source=unit.source,
                header=unit.header,
            )
            self._units[unit.name] = unit
        assert self._units[unit.name] == unit, f"two kernels are called {unit.name}"
        arrays = [inputs[name] for name in unit.input_names]
        for name, array in zip(unit.input_names, arrays, strict=True):
            if array.size < MIN_ELEMENTS:
                raise ValueError(
                    f"{unit.name}: input {name} has {array.size} elements; pad it to {MIN_ELEMENTS}"
                )
        outputs = self._compiled[unit.name](
            inputs=arrays,
            grid=launch.grid,
            threadgroup=launch.threadgroup,
            output_shapes=[shape for shape, _ in launch.outputs],
            output_dtypes=[dtype for _, dtype in launch.outputs],
        )
        return list(outputs)


def padded(array: NDArray[Any]) -> mx.array:
    """The array on the device with at least 8 elements, zeros at the end of the last axis."""
    rows = int(np.prod(array.shape[:-1]))
    missing = -(-MIN_ELEMENTS // max(rows, 1)) - array.shape[-1]
    if missing > 0:
        array = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])
    return mx.array(array)
