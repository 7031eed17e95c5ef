"""Errors of compiling and running a Metal kernel on the CPU.

MetalEmulatorError
├── NoMetalCompilerError    this machine has no suitable compiler, so tests skip
├── MetalCompileError       the kernel is not valid, or breaks a limit that is known at build time
└── MetalRuntimeError       the launch is impossible, or the kernel broke a rule while it ran
"""

from __future__ import annotations


class MetalEmulatorError(Exception):
    """Base of all errors of the emulator."""


class NoMetalCompilerError(MetalEmulatorError):
    """No compiler here can build kernels; the message names a package to install."""


class MetalCompileError(MetalEmulatorError):
    """The kernel does not compile; the message is the compiler's."""


class MetalRuntimeError(MetalEmulatorError):
    """The kernel broke rules; the message has a line per rule, with buffer, thread and source line."""
