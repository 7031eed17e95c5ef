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


PAGES = ("k_codes", "k_scales", "v_codes", "v_scales")
RECURRENT = ("delta", "ssd", "conv")
WRITERS = ("write", "copy", *RECURRENT)
"""Kernels that write their inputs."""

_UNTOUCHED = 123.5
"""Output of recurrences where nothing is written; exact in 16 bits."""


def memory_of(array: mx.array) -> NDArray[Any]:
    """Return the array's memory as writable unsigned integers."""
    unsigned = array.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.dtype.size])
    mx.eval(unsigned)
    return np.array(unsigned, copy=False)


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

    refuses: bool = False
    """Whether no kernel may write its inputs."""

    forgets: tuple[str, ...] = ()
    """Kernels whose writes to inputs are lost."""

    def compile(
        self, *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
    ) -> Callable[..., Sequence[mx.array]]:
        """Replaces ``mx.fast.metal_kernel``. An array that a kernel writes is passed to it as an output."""
        kind = name.split("_")[1]
        pools: list[str] = []
        if kind in WRITERS and not self.refuses:
            pools = [part for part in input_names if part in PAGES or part.startswith("to_")]
            pools = [part for part in pools if kind == "write" or part not in PAGES]
        read = [part for part in input_names if part not in pools]
        kernel = MetalKernel(name, read, [*output_names, *pools], source, header)

        def launch(**arguments: Any) -> list[mx.array]:
            self.sign(name, arguments["inputs"])
            if not self.computes:
                return ones(arguments)
            inputs = dict(zip(input_names, arguments["inputs"], strict=True))
            mx.eval(list(inputs.values()))
            arrays = [inputs[part] for part in pools]
            arguments["inputs"] = [inputs[part] for part in read]
            arguments["output_shapes"] = [*arguments["output_shapes"], *(a.shape for a in arrays)]
            arguments["output_dtypes"] = [*arguments["output_dtypes"], *(a.dtype for a in arrays)]
            before = _UNTOUCHED if kind in RECURRENT else 0
            outputs = kernel(
                **arguments,
                init_value=before if pools else None,
                seed=self.seed,
                schedule=self.schedule,
                extra_flags=self.extra_flags,
                ftz=self.ftz,
                valid={key: mask for key, mask in self.valid.items() if key in read},
            )
            assert kernel.last is not None
            self.results.append((name, kernel.last))
            if pools:
                assert kind != "copy" or outputs[0].all(), f"{name} left its token unwritten"
                rows = _written_rows(name, inputs, arguments["grid"])
                for array, written in zip(arrays, outputs[len(output_names) :], strict=True):
                    memory = memory_of(array)
                    others = np.delete(written, rows, axis=0)
                    assert (others == before).all(), f"{name} wrote rows that are not its own"
                    if kind not in self.forgets:
                        memory[rows] = written.view(memory.dtype)[rows]
            return [to_mlx(output) for output in outputs[: len(output_names)]]

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


def _written_rows(name: str, inputs: dict[str, mx.array], grid: tuple[int, int, int]) -> NDArray[np.int64]:
    if "segments" in inputs:
        segments = np.array(inputs["segments"])[: grid[2]]
        kept = np.array(inputs["checkpoints"]).reshape(-1, 2)
        slots = [kept[first:end, 1] for first, end in segments[:, 4:6]]
        return np.concatenate([segments[:, 3], *slots]).astype(np.int64)
    if "targets" in inputs:
        tokens, heads, _ = inputs["keys"].shape
        return np.array(inputs["targets"])[: tokens * heads].astype(np.int64)
    heads, page_size = (int(part) for part in name.split("_")[-2:])
    threads, size = 128, heads * page_size
    targets = np.array(inputs["pairs"]).reshape(-1, 2)[: grid[0] // threads, 1].astype(np.int64)
    return np.asarray((targets[:, None] * size + np.arange(size)).ravel())
