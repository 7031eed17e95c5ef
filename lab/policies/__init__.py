"""Experimental eviction policies, registered by importing this package."""

from . import lfu

__all__ = ["lfu"]
