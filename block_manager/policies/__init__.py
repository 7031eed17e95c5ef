"""Eviction policies by name."""

from __future__ import annotations

from .base import POLICIES, EvictionPolicy, make_policy, register
from .lru import LRU

DEFAULT_POLICY = "lru"

__all__ = ["DEFAULT_POLICY", "LRU", "POLICIES", "EvictionPolicy", "make_policy", "register"]
