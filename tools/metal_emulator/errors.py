"""What can go wrong when a Metal kernel is compiled and run on the CPU.

MetalEmulatorError
├── NoMetalCompilerError    no compiler on this machine is good enough: tests skip
├── MetalCompileError       the kernel is not valid, or breaks a limit that is known when it is built
└── MetalRuntimeError       the launch is impossible, or running it broke a rule
"""

from __future__ import annotations


class MetalEmulatorError(Exception):
    """Every error of the emulator."""


class NoMetalCompilerError(MetalEmulatorError):
    """No compiler here can build kernels; the message says what to install."""


class MetalCompileError(MetalEmulatorError):
    """The kernel does not compile, with the compiler's own words."""


class MetalRuntimeError(MetalEmulatorError):
    """One line per broken rule, each naming the buffer, the thread and the line of source."""
