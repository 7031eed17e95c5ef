from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .units import MIN_ELEMENTS, KernelSource


class CompileKernel(Protocol):
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
    """Sizes of a launch.

    grid         number of threads, as in MLX; a multiple of ``threadgroup``
    """

    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    outputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...]


def _metal_kernel(**parts: Any) -> Callable[..., Sequence[mx.array]]:
    return cast(Callable[..., Sequence[mx.array]], mx.fast.metal_kernel(**parts))


@dataclass(frozen=True, slots=True)
class Kernel:
    unit: KernelSource
    compiled: Callable[..., Sequence[mx.array]]

    def __call__(self, inputs: Mapping[str, mx.array], launch: Launch) -> list[mx.array]:
        """Launch the kernel and return its outputs in order; ignore unknown inputs."""
        arrays = [inputs[name] for name in self.unit.input_names]
        for name, array in zip(self.unit.input_names, arrays, strict=True):
            if array.size < MIN_ELEMENTS:
                raise ValueError(
                    f"{self.unit.name}: input {name} has {array.size} elements; pad it to {MIN_ELEMENTS}"
                )
        outputs = self.compiled(
            inputs=arrays,
            grid=launch.grid,
            threadgroup=launch.threadgroup,
            output_shapes=[shape for shape, _ in launch.outputs],
            output_dtypes=[dtype for _, dtype in launch.outputs],
        )
        return list(outputs)


@dataclass(slots=True)
class KernelLibrary:
    compile_kernel: CompileKernel = _metal_kernel
    _kernels: dict[str, Kernel] = field(default_factory=dict)
    _made: dict[Hashable, Kernel] = field(default_factory=dict)

    def kernel(self, unit: KernelSource) -> Kernel:
        """Return the kernel of this source, compiled at its first launch."""
        if unit.name not in self._kernels:
            compiled = self.compile_kernel(
                name=unit.name,
                input_names=list(unit.input_names),
                output_names=list(unit.output_names),
                source=unit.source,
                header=unit.header,
            )
            self._kernels[unit.name] = Kernel(unit, compiled)
        kernel = self._kernels[unit.name]
        assert kernel.unit == unit, f"two kernels are called {unit.name}"
        return kernel

    def made(self, key: Hashable, unit: Callable[[], KernelSource]) -> Kernel:
        """Return the kernel of this key; its source is made at the first call."""
        if key not in self._made:
            self._made[key] = self.kernel(unit())
        return self._made[key]

    def run(self, unit: KernelSource, inputs: Mapping[str, mx.array], launch: Launch) -> list[mx.array]:
        return self.kernel(unit)(inputs, launch)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._kernels)


def padded(array: NDArray[Any]) -> mx.array:
    """Return the array on the device, zero-padded to at least 8 elements."""
    rows = int(np.prod(array.shape[:-1]))
    missing = -(-MIN_ELEMENTS // max(rows, 1)) - array.shape[-1]
    if missing > 0:
        array = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])
    return mx.array(array)


def wide(array: mx.array) -> mx.array:
    """Return the array, flattened and zero-padded if it has fewer than 8 elements."""
    missing = MIN_ELEMENTS - array.size
    return array if missing <= 0 else mx.pad(array.flatten(), (0, missing))
