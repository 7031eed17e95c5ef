"""Emulator of Metal compute kernels on a Linux CPU, with every memory access checked.

`MetalKernel` and `emulate` take the arguments of `mx.fast.metal_kernel`. A kernel goes through four modules:
assemble (MLX's text) -> rewrite (what macros cannot do) -> build (clang) -> run (threads are fibers, in a
seeded order).

A run finds accesses out of bounds or misaligned, reads of unwritten memory, races, divergent barriers and
simdgroup operations, integer overflow, unwritten outputs, endless loops, and too much threadgroup memory.
`lint` finds code that Metal forbids and C++ allows. `Result.traffic` counts the device memory moved.

The emulator cannot tell whether Apple's compiler accepts a kernel, how many registers it takes, or how fast
it is. Threadgroups run one after the other, so a kernel that waits for another threadgroup never ends.
"""

from __future__ import annotations

from metal_emulator.assemble import KernelSource, assemble
from metal_emulator.build import FAST_MATH, NO_CONTRACTION
from metal_emulator.compiler import find_compiler, why_unavailable
from metal_emulator.errors import (
    MetalCompileError,
    MetalEmulatorError,
    MetalRuntimeError,
    NoMetalCompilerError,
)
from metal_emulator.lint import lint, lint_text, lint_unit
from metal_emulator.run import MetalKernel, Options, Result, Stats, emulate
from metal_emulator.tensors import Tensor
from metal_emulator.traffic import Count, Site, Traffic

__all__ = [
    "FAST_MATH",
    "NO_CONTRACTION",
    "Count",
    "KernelSource",
    "MetalCompileError",
    "MetalEmulatorError",
    "MetalKernel",
    "MetalRuntimeError",
    "NoMetalCompilerError",
    "Options",
    "Result",
    "Site",
    "Stats",
    "Tensor",
    "Traffic",
    "assemble",
    "emulate",
    "find_compiler",
    "lint",
    "lint_text",
    "lint_unit",
    "why_unavailable",
]
