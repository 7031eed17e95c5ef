"""Run Metal compute kernels on a Linux CPU, from the source that a Mac compiles, with every access checked.

`MetalKernel` and `emulate` take what `mx.fast.metal_kernel` takes. What happens to a kernel:
assemble (the text MLX would build) -> rewrite (what macros cannot do) -> build (clang, over shim/, with
instrumentation calling into runtime/) -> run (threads as fibers, in a seeded order).

Found while it runs: accesses out of bounds or misaligned, reads of what nobody wrote or of elements the
test marked as not owned, races on threadgroup and device memory, divergent barriers and simdgroup operations,
integer overflow, outputs never written, loops without end, too much threadgroup memory. `lint` finds
what Metal forbids and C++ allows. `Result.traffic` counts the device memory moved, `Result.stats.operations`
products of matrices, shuffles and barriers.

What it cannot say: whether Apple's compiler accepts a kernel, how many registers it takes, how fast it is.
Precision of functions, order of reductions and NaNs in min and max are one choice among those that Metal
leaves open. Vectors of more than 16 bytes are caught only at the ends of buffers. Waiting for another
threadgroup never ends: threadgroups run one after the other.
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
