"""Run Metal compute kernels on a Linux CPU, from the source that a Mac compiles, with every access checked.

`MetalKernel` and `emulate` take the arguments of `mx.fast.metal_kernel`. A kernel goes through four modules:
assemble (the text that MLX would build) -> rewrite (what macros cannot do) -> build (clang, over shim/, with
instrumentation that calls runtime/) -> run (threads are fibers, in a seeded order).

A run finds accesses that are out of bounds or misaligned, reads of memory that was never written or that the
test marked as not owned, races on threadgroup and device memory, divergent barriers and simdgroup operations,
integer overflow, outputs that were never written, endless loops, and too much threadgroup memory. `lint`
finds what Metal forbids and C++ allows. `Result.traffic` counts the device memory moved;
`Result.stats.operations` counts matrix products, shuffles and barriers.

The emulator cannot tell whether Apple's compiler accepts a kernel, how many registers a kernel takes, or how
fast it is. Metal leaves open the precision of functions, the order of reductions and NaNs in min and max; the
emulator makes one choice. It checks accesses of vectors of more than 16 bytes only at the ends of buffers.
Threadgroups run one after the other, so a kernel that waits for another threadgroup never ends.
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
