"""Experimental eviction policies, registered by importing this package."""

from . import gittins, lfu

__all__ = ["gittins", "lfu"]
