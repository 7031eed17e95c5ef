from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from octavo.kernels.backends import release_kept_memory

from ..memory.malloc import give_memory_back


def give_freed_memory_back(backend_name: str) -> None:
    """Return freed memory to the operating system. Takes some milliseconds."""
    mx.clear_cache()
    release_kept_memory(backend_name)
    give_memory_back()


@contextmanager
def nothing_cached(backend_name: str) -> Iterator[None]:
    """Turn off MLX's buffer cache on the CPU while the block runs."""
    if backend_name != "cpu":
        yield
        return
    limit = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(limit)
