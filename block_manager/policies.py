"""The eviction policies there are, by name."""

from __future__ import annotations

from collections.abc import Callable

from .policy import LFU, LRU, EvictionPolicy
from .policy_gittins import Gittins

MIN_GHOSTS = 32_768  # remembers returns in a small pool, too; some 150 bytes each

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda _num_pages: LRU(),
    "lfu": lambda _num_pages: LFU(),
    "gittins": lambda num_pages: Gittins(num_pages, max(MIN_GHOSTS, 2 * num_pages)),
}
DEFAULT_POLICY = "lru"


def make_policy(name: str, num_pages: int) -> EvictionPolicy:
    """A policy for a pool of this size; ValueError if there is none of this name."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name](num_pages)
