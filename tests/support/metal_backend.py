"""The Metal backend on the emulator, which checks every memory access."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from metal_emulator import MetalKernel, Result, why_unavailable
from octavo.kernels.metal.backend import MetalBackend
from octavo.kernels.metal.launch import KernelLibrary

needs_compiler = pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or "")


@dataclass
class Emulator:
    seed: int = 0
    schedule: str = "mixed"
    extra_flags: tuple[str, ...] = ()
    ftz: bool = True
    valid: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    results: list[tuple[str, Result]] = field(default_factory=list)
    signatures: set[str] = field(default_factory=set)
    computes: bool = True

    def compile(
        self, *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
    ) -> Callable[..., Sequence[mx.array]]:
        """Replaces ``mx.fast.metal_kernel``."""
        kernel = MetalKernel(name, input_names, output_names, source, header)

        def launch(**arguments: Any) -> list[mx.array]:
            self.sign(name, arguments["inputs"])
            if not self.computes:
                return ones(arguments)
            outputs = kernel(
                **arguments,
                seed=self.seed,
                schedule=self.schedule,
                extra_flags=self.extra_flags,
                ftz=self.ftz,
                valid={key: mask for key, mask in self.valid.items() if key in input_names},
            )
            assert kernel.last is not None
            self.results.append((name, kernel.last))
            return [to_mlx(output) for output in outputs]

        return launch

    def sign(self, name: str, inputs: Sequence[mx.array]) -> None:
        self.signatures.add(" ".join([name, *(str(array.dtype) for array in inputs)]))

    def backend(self) -> MetalBackend:
        return MetalBackend(KernelLibrary(self.compile))

    @property
    def launches(self) -> Counter[str]:
        return Counter(name.split("_")[1] for name, _ in self.results)

    def ran(self, kernel: str) -> list[Result]:
        return [result for name, result in self.results if name.startswith(f"octavo_{kernel}_")]


def ones(arguments: Mapping[str, Any]) -> list[mx.array]:
    """Return outputs of a launch that is not computed."""
    return [
        (mx.zeros if dtype == mx.bool_ else mx.ones)(shape, dtype)
        for shape, dtype in zip(arguments["output_shapes"], arguments["output_dtypes"], strict=True)
    ]


def to_mlx(array: NDArray[Any]) -> mx.array:
    if array.dtype == ml_dtypes.bfloat16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


def as_rows(array: mx.array) -> NDArray[np.float32]:
    return np.array(array.astype(mx.float32))
