"""Eviction policies that are measured, documented and not the engine's: importing this registers them."""

from . import gittins, lfu

__all__ = ["gittins", "lfu"]
