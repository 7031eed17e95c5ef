"""Memory that was freed goes back to the system, where the C library would keep it."""

from __future__ import annotations

import contextlib
import ctypes
import sys


def give_memory_back() -> None:
    """Let the C library return what was freed: glibc keeps what lies below anything still in use
    (malloc_trim(3)). Takes some milliseconds of the calling thread; others go on."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library has none
            ctypes.CDLL(None).malloc_trim(0)
