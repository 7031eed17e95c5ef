from __future__ import annotations

from .base import LRU, POLICIES, EvictionPolicy, make_policy, register

DEFAULT_POLICY = "lru"

__all__ = ["DEFAULT_POLICY", "LRU", "POLICIES", "EvictionPolicy", "make_policy", "register"]
