from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx

_ORIGINALS = "_octavo_originals"


def override(
    module: str, name: str, make: Callable[[Callable[..., mx.array]], Callable[..., mx.array]]
) -> None:
    """Replace a function, or a ``Class.method``, of a module by ``make(original)``."""
    found: Any = sys.modules.get(module)
    if found is None or name in (originals := found.__dict__.setdefault(_ORIGINALS, {})):
        return
    *owners, attribute = name.split(".")
    owner = functools.reduce(getattr, owners, found)
    original = originals[name] = getattr(owner, attribute)
    setattr(owner, attribute, functools.wraps(original)(make(original)))


def original(module: str, name: str) -> Callable[..., mx.array]:
    found: Any = sys.modules[module]
    function: Callable[..., mx.array] | None = found.__dict__.get(_ORIGINALS, {}).get(name)
    return functools.reduce(getattr, name.split("."), found) if function is None else function
