from __future__ import annotations

import contextlib
import ctypes
import sys


def give_memory_back() -> None:
    """Make the C library return freed memory (malloc_trim(3)). Takes some milliseconds."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library lacks the function
            ctypes.CDLL(None).malloc_trim(0)
