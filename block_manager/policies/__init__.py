"""Eviction policies by name. Every file of this folder that registers one is found by itself."""

from __future__ import annotations

import importlib
import pkgutil

from .base import POLICIES, EvictionPolicy, make_policy, register

DEFAULT_POLICY = "lru"

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
for _name in sorted(POLICIES, key=lambda name: (name != DEFAULT_POLICY, name)):  # the default first
    POLICIES[_name] = POLICIES.pop(_name)

__all__ = ["DEFAULT_POLICY", "POLICIES", "EvictionPolicy", "make_policy", "register"]
